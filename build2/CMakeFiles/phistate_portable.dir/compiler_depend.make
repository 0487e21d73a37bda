# Empty compiler generated dependencies file for phistate_portable.
# This may be replaced when dependencies are built.

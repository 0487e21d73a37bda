# Empty compiler generated dependencies file for phistate_x86_v3.
# This may be replaced when dependencies are built.

# Empty dependencies file for phistate.
# This may be replaced when dependencies are built.

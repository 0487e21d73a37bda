# Empty dependencies file for phistate_x86_v4.
# This may be replaced when dependencies are built.

# Empty dependencies file for phistate_x86_v4_bf16.
# This may be replaced when dependencies are built.

file(REMOVE_RECURSE
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/additive_forward.cpp.o"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/additive_forward.cpp.o.d"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/delta_backward.cpp.o"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/delta_backward.cpp.o.d"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/delta_forward.cpp.o"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/delta_forward.cpp.o.d"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/delta_step.cpp.o"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/delta_step.cpp.o.d"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/isa_table.cpp.o"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/isa_table.cpp.o.d"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/probe.cpp.o"
  "CMakeFiles/phistate_x86_v4_bf16.dir/csrc/probe.cpp.o.d"
)

# Per-language clean rules from dependency scanning.
foreach(lang CXX)
  include(CMakeFiles/phistate_x86_v4_bf16.dir/cmake_clean_${lang}.cmake OPTIONAL)
endforeach()

file(REMOVE_RECURSE
  "CMakeFiles/phistate_portable.dir/csrc/additive_forward.cpp.o"
  "CMakeFiles/phistate_portable.dir/csrc/additive_forward.cpp.o.d"
  "CMakeFiles/phistate_portable.dir/csrc/delta_backward.cpp.o"
  "CMakeFiles/phistate_portable.dir/csrc/delta_backward.cpp.o.d"
  "CMakeFiles/phistate_portable.dir/csrc/delta_forward.cpp.o"
  "CMakeFiles/phistate_portable.dir/csrc/delta_forward.cpp.o.d"
  "CMakeFiles/phistate_portable.dir/csrc/delta_step.cpp.o"
  "CMakeFiles/phistate_portable.dir/csrc/delta_step.cpp.o.d"
  "CMakeFiles/phistate_portable.dir/csrc/isa_table.cpp.o"
  "CMakeFiles/phistate_portable.dir/csrc/isa_table.cpp.o.d"
  "CMakeFiles/phistate_portable.dir/csrc/probe.cpp.o"
  "CMakeFiles/phistate_portable.dir/csrc/probe.cpp.o.d"
)

# Per-language clean rules from dependency scanning.
foreach(lang CXX)
  include(CMakeFiles/phistate_portable.dir/cmake_clean_${lang}.cmake OPTIONAL)
endforeach()

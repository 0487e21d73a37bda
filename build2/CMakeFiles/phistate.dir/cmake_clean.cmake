file(REMOVE_RECURSE
  "CMakeFiles/phistate.dir/csrc/dispatch.cpp.o"
  "CMakeFiles/phistate.dir/csrc/dispatch.cpp.o.d"
  "CMakeFiles/phistate.dir/csrc/runtime.cpp.o"
  "CMakeFiles/phistate.dir/csrc/runtime.cpp.o.d"
  "libphistate.pdb"
  "libphistate.so"
)

# Per-language clean rules from dependency scanning.
foreach(lang CXX)
  include(CMakeFiles/phistate.dir/cmake_clean_${lang}.cmake OPTIONAL)
endforeach()

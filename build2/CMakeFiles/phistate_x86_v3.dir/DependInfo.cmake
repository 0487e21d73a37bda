
# Consider dependencies only in project.
set(CMAKE_DEPENDS_IN_PROJECT_ONLY OFF)

# The set of languages for which implicit dependencies are needed:
set(CMAKE_DEPENDS_LANGUAGES
  )

# The set of dependency files which are needed:
set(CMAKE_DEPENDS_DEPENDENCY_FILES
  "/work/wt-delta/csrc/additive_forward.cpp" "CMakeFiles/phistate_x86_v3.dir/csrc/additive_forward.cpp.o" "gcc" "CMakeFiles/phistate_x86_v3.dir/csrc/additive_forward.cpp.o.d"
  "/work/wt-delta/csrc/delta_backward.cpp" "CMakeFiles/phistate_x86_v3.dir/csrc/delta_backward.cpp.o" "gcc" "CMakeFiles/phistate_x86_v3.dir/csrc/delta_backward.cpp.o.d"
  "/work/wt-delta/csrc/delta_forward.cpp" "CMakeFiles/phistate_x86_v3.dir/csrc/delta_forward.cpp.o" "gcc" "CMakeFiles/phistate_x86_v3.dir/csrc/delta_forward.cpp.o.d"
  "/work/wt-delta/csrc/delta_step.cpp" "CMakeFiles/phistate_x86_v3.dir/csrc/delta_step.cpp.o" "gcc" "CMakeFiles/phistate_x86_v3.dir/csrc/delta_step.cpp.o.d"
  "/work/wt-delta/csrc/isa_table.cpp" "CMakeFiles/phistate_x86_v3.dir/csrc/isa_table.cpp.o" "gcc" "CMakeFiles/phistate_x86_v3.dir/csrc/isa_table.cpp.o.d"
  "/work/wt-delta/csrc/probe.cpp" "CMakeFiles/phistate_x86_v3.dir/csrc/probe.cpp.o" "gcc" "CMakeFiles/phistate_x86_v3.dir/csrc/probe.cpp.o.d"
  )

# Targets to which this target links.
set(CMAKE_TARGET_LINKED_INFO_FILES
  )

# Fortran module output directory.
set(CMAKE_Fortran_TARGET_MODULE_DIR "")

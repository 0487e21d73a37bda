
# Consider dependencies only in project.
set(CMAKE_DEPENDS_IN_PROJECT_ONLY OFF)

# The set of languages for which implicit dependencies are needed:
set(CMAKE_DEPENDS_LANGUAGES
  )

# The set of dependency files which are needed:
set(CMAKE_DEPENDS_DEPENDENCY_FILES
  "/work/wt-delta/csrc/dispatch.cpp" "CMakeFiles/phistate.dir/csrc/dispatch.cpp.o" "gcc" "CMakeFiles/phistate.dir/csrc/dispatch.cpp.o.d"
  "/work/wt-delta/csrc/runtime.cpp" "CMakeFiles/phistate.dir/csrc/runtime.cpp.o" "gcc" "CMakeFiles/phistate.dir/csrc/runtime.cpp.o.d"
  )

# Targets to which this target links.
set(CMAKE_TARGET_LINKED_INFO_FILES
  )

# Fortran module output directory.
set(CMAKE_Fortran_TARGET_MODULE_DIR "")

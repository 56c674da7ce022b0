# find_package(factormax): the target factormax::factormax.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include("${CMAKE_CURRENT_LIST_DIR}/factormax-targets.cmake")

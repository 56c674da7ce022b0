# Installs the library, then builds and runs the examples against what was installed.
set(package "${BUILD}/package")
file(REMOVE_RECURSE "${package}")
file(REAL_PATH "${CMAKE_CURRENT_LIST_DIR}/../examples" examples)

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install "${BUILD}" --config "${CONFIG}" --prefix "${package}/prefix"
    --component cpp)
run(${CMAKE_COMMAND} -S "${examples}" -B "${package}/build" -G "${GENERATOR}"
    "-DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}" "-DCMAKE_CXX_COMPILER=${CXX}"
    "-DCMAKE_BUILD_TYPE=${CONFIG}" "-DCMAKE_PREFIX_PATH=${package}/prefix")
run(${CMAKE_COMMAND} --build "${package}/build" --config "${CONFIG}")
find_program(matching matching PATHS "${package}/build" "${package}/build/${CONFIG}"
             NO_DEFAULT_PATH REQUIRED)
run("${matching}")

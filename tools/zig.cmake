# Toolchain for another system: the compiler, C library and headers of PyPI's ziglang.
#   cmake -DCMAKE_TOOLCHAIN_FILE=tools/zig.cmake -DWHET_ZIG=.venv/bin/python-zig -DWHET_TARGET=x86_64-windows-gnu
# Other targets: aarch64-macos.11.0, x86_64-macos.10.13, x86_64-linux-musl, x86_64-linux-gnu.2.28, aarch64-linux-gnu.2.28.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES WHET_TARGET WHET_ZIG)
string(REGEX MATCH "^([a-z0-9_]+)-([a-z]+)" _ "${WHET_TARGET}")
set(CMAKE_SYSTEM_PROCESSOR ${CMAKE_MATCH_1})
set(WHET_SYSTEM_NAME_linux Linux)
set(WHET_SYSTEM_NAME_macos Darwin)
set(WHET_SYSTEM_NAME_windows Windows)
set(CMAKE_SYSTEM_NAME ${WHET_SYSTEM_NAME_${CMAKE_MATCH_2}})

set(CMAKE_CXX_COMPILER ${WHET_ZIG} c++ -target ${WHET_TARGET})
# CMake's own detection links a program, for which zig compiles its C++ library first.
set(CMAKE_CXX_COMPILER_ID_RUN ON)
set(CMAKE_CXX_COMPILER_FORCED ON)
set(CMAKE_CXX_COMPILER_ID Clang)
execute_process(COMMAND ${WHET_ZIG} c++ --version OUTPUT_VARIABLE WHET_CLANG)
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" CMAKE_CXX_COMPILER_VERSION "${WHET_CLANG}")
set(CMAKE_CXX_COMPILER_FRONTEND_VARIANT GNU)
set(CMAKE_CXX_STANDARD_COMPUTED_DEFAULT 17)
set(CMAKE_CXX_COMPILE_FEATURES cxx_std_17 cxx_std_20)  # what nanobind and this project ask for
set(CMAKE_CXX_ARCHIVE_CREATE "${WHET_ZIG} ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "${WHET_ZIG} ar q <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "${WHET_ZIG} ranlib <TARGET>")
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_SKIP_RPATH ON)
set(CMAKE_INSTALL_NAME_TOOL ${WHET_ZIG})  # required for Darwin, not used
if(CMAKE_SYSTEM_NAME STREQUAL "Windows")
  set(CMAKE_CROSSCOMPILING_EMULATOR wine)
elseif(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "aarch64")
  set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static)
endif()

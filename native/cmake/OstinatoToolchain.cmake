include(CheckCXXSourceCompiles)
include(CheckLanguage)

# Enables C++ and sets OSTINATO_XLA_INCLUDE, or sets `missing_var` to the reason why
# the native library cannot be built here. A macro, since enable_language() has to run
# in the scope of the caller.
macro(ostinato_find_toolchain missing_var)
  set(${missing_var} "")
  if(NOT CMAKE_SYSTEM_NAME MATCHES "^(Linux|Darwin)$")
    set(${missing_var} "it is not built for ${CMAKE_SYSTEM_NAME}")
  endif()
  if(NOT ${missing_var})
    check_language(CXX)
    if(CMAKE_CXX_COMPILER)
      enable_language(CXX)
    else()
      set(${missing_var} "no working C++ compiler was found")
    endif()
  endif()
  if(NOT ${missing_var})
    _ostinato_find_xla_headers()
    if(NOT OSTINATO_XLA_INCLUDE)
      set(${missing_var} "jax was not importable at build time, so XLA's FFI headers were not found")
    endif()
  endif()
  if(NOT ${missing_var})
    _ostinato_check_headers_compile()
    if(NOT OSTINATO_HEADERS_COMPILE)
      set(${missing_var} "the C++ compiler (${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}) cannot compile XLA's FFI headers as C++17")
    endif()
  endif()
endmacro()

# The headers travel with jaxlib, and only jax knows where.
function(_ostinato_find_xla_headers)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import jax; print(jax.ffi.include_dir())"
    OUTPUT_VARIABLE include_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed)
  if(failed)
    set(include_dir "")
  endif()
  set(OSTINATO_XLA_INCLUDE "${include_dir}" PARENT_SCOPE)
endfunction()

function(_ostinato_check_headers_compile)
  set(CMAKE_CXX_STANDARD 17)
  set(CMAKE_CXX_STANDARD_REQUIRED ON)
  set(CMAKE_REQUIRED_INCLUDES "${OSTINATO_XLA_INCLUDE}")
  # The headers of another jax may not compile: do not trust an older answer.
  unset(OSTINATO_HEADERS_COMPILE CACHE)
  check_cxx_source_compiles(
    "#include \"xla/ffi/api/ffi.h\"\nint main() { return 0; }" OSTINATO_HEADERS_COMPILE)
endfunction()

# The compiler of the published wheel: zig, from the package ziglang of PyPI. It brings
# the headers of an old glibc, so that the library runs on old systems whatever this
# one has, and links its own C++ library statically.
set(CMAKE_CXX_COMPILER "$ENV{OSTINATO_ZIG};c++;-target;x86_64-linux-gnu.2.17")

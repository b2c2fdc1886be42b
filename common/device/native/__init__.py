"""C++ kernels for the CPU, built at install for the machine at hand, and the ops over them."""

"""C++ kernels for the CPU, built at install time for this machine, and the ops that call them."""

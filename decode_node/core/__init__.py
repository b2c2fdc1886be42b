"""The decode leg's decisions. Pure: no sockets, tensors, threads or clock."""

"""Transports of weight syncs: shared memory, Ray's object store, gloo, CUDA IPC and NCCL."""

// What CUDA's headers take from this file, which only its compiler's package has.
#pragma once
#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __specialization_static
#define __inline_hint__
#define __noinline__
#define __no_return__ __attribute__((noreturn))
#define __forceinline__ inline
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDAAPI

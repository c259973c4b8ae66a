// The CUDA launchers as a Python module that works on host memory: what gradzip._C.cuda is where there is a device.
#include "cuda_runtime.h"

#include "cuda/abs_max.cu"
#include "cuda/bindings.h"
#include "cuda/compact.cu"
#include "cuda/elias.cu"
#include "cuda/index_code.cu"
#include "cuda/low_rank.cu"
#include "cuda/marked_indices.cu"
#include "cuda/one_bit.cu"
#include "cuda/orthogonalize.cu"
#include "cuda/pack_bits.cu"
#include "cuda/payload.cu"
#include "cuda/quantize.cu"
#include "cuda/range_float.cu"
#include "cuda/select.cu"
#include "cuda/select_sampled.cu"
#include "cuda/signs.cu"
#include "cuda/spectrum.cu"
#include "cuda/ternary.cu"

PYBIND11_MODULE(simt_cuda, m) { gradzip::cuda::bind(m); }

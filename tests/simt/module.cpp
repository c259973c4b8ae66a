// The CUDA launchers as a Python module on host memory, with the functions of gradzip._C.cuda.
#include <pybind11/stl.h>

#include "cuda_runtime.h"

#include "cuda/abs_max.cu"
#include "cuda/atom_probabilities.cu"
#include "cuda/bernoulli.cu"
#include "cuda/bindings.h"
#include "cuda/bitmap.cu"
#include "cuda/bitmap_code.cu"
#include "cuda/block_float.cu"
#include "cuda/bucket_norms.cu"
#include "cuda/chunk_topk.cu"
#include "cuda/compact.cu"
#include "cuda/elias.cu"
#include "cuda/index_code.cu"
#include "cuda/low_rank.cu"
#include "cuda/natural.cu"
#include "cuda/one_bit.cu"
#include "cuda/orthogonalize.cu"
#include "cuda/pack_bits.cu"
#include "cuda/payload.cu"
#include "cuda/quantize.cu"
#include "cuda/random_indices.cu"
#include "cuda/range_float.cu"
#include "cuda/select.cu"
#include "cuda/select_sampled.cu"
#include "cuda/signs.cu"
#include "cuda/ternary.cu"
#include "cuda/transform.cu"

PYBIND11_MODULE(simt_cuda, m) {
  gradzip::cuda::bind(m);
  // From now on, count what launchers queue on a device of so many multiprocessors, and run nothing; 0: run again.
  m.def("count_only", [](int multiprocessors) {
    simt::options.dry = multiprocessors > 0;
    simt::options.multiprocessors = multiprocessors > 0 ? multiprocessors : simt::Options().multiprocessors;
  });
  // Call a function, and return a line for each launch and memory fill that it queued.
  m.def("recorded", [](const pybind11::function& call) {
    simt::recorded.clear();
    simt::record = true;
    call();
    simt::record = false;
    return simt::recorded;
  });
  // The kernels and memory fills queued so far.
  m.def("queued", [] { return simt::launches + simt::memsets; });
}

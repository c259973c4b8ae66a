// The types of the elements of arrays, for kernels that take several.
#pragma once

#include "common/half.h"

namespace gradzip {

inline int dtype_of(const float*) { return int(Dtype::float32); }
inline int dtype_of(const BFloat16*) { return int(Dtype::bfloat16); }
inline int dtype_of(const Float16*) { return int(Dtype::float16); }

// f(x as a pointer to numbers of this type).
template <class F>
auto typed(const void* x, int dtype, F&& f) {
  if (Dtype(dtype) == Dtype::bfloat16) return f(static_cast<const BFloat16*>(x));
  if (Dtype(dtype) == Dtype::float16) return f(static_cast<const Float16*>(x));
  return f(static_cast<const float*>(x));
}
template <class F>
auto typed(void* x, int dtype, F&& f) {
  if (Dtype(dtype) == Dtype::bfloat16) return f(static_cast<BFloat16*>(x));
  if (Dtype(dtype) == Dtype::float16) return f(static_cast<Float16*>(x));
  return f(static_cast<float*>(x));
}

}  // namespace gradzip

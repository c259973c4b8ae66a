// The norms of the buckets of several vectors, for launchers that need them.
#pragma once

#include <vector>

#include "cuda/ops.h"

namespace gradzip::cuda {

// `bucket_norms` of each vector; all are of one type.
int64_t bucket_norms_all(void* workspace, const std::vector<NormsSource>& vectors, int dtype, int64_t bucket, int norm,
                         cudaStream_t stream);

}  // namespace gradzip::cuda

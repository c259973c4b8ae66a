#include "cuda/ops.h"
#include "cuda/select_launch.h"

namespace gradzip::cuda {

int64_t select(void* workspace, const float* x, int64_t n, int64_t k, Selection* selection, cudaStream_t stream) {
  Arena arena(workspace);
  auto* state = arena.take<SelectState>(1);
  const SelectLaunch passes(arena, {{x, n, k, state, selection, {}}});
  if (!workspace) return arena.nbytes();
  clear(state, sizeof *state, stream);
  passes.launch_on(stream);
  return 0;
}

}  // namespace gradzip::cuda

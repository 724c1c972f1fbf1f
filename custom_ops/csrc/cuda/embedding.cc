#include "gpu.h"
#include "operators.generated.h"

namespace piccard::embedding {

void compute(Call& call) {
  using Embed = kernels::embed;
  cuda::Gpu gpu(call);
  const int64_t D = call.value(name::D);
  const Embed::Dims dims{.tokens = call.value(name::T), .width = D};
  gpu.launch<Embed>(gpu.choose<Embed>(dims), dims,
                    {.tokens_ptr = call.input(input::token_ids).data,
                     .sources_ptr = call.input(input::sources).data,
                     .last_ptr = call.input(input::last_tokens).data,
                     .embedding_ptr = call.input(input::table).data,
                     .out_ptr = call.output(output::y).data,
                     .width = cuda::narrow(D)});
}

}  // namespace piccard::embedding

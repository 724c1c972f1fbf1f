#include "operators.generated.h"
#include "unpacked_product.h"

namespace piccard::matmul_fp8_block {

namespace {

// CHUNK, TILE_ROWS and TILE_COLUMNS of fp8_block_gemm_triton.py; GEMV_ROWS and GEMM_ROWS of packed_product.py.
constexpr int64_t kChunk = 16, kTileRows = 128, kTileColumns = 128, kVectorRows = 2, kTiledRows = 64;

struct Product {
  cuda::Gpu& gpu;
  const void *x, *weight, *scale;
  // Whether nothing of the weight is written during a run.
  bool constant;
  cuda::Added added;
  void* y;
  int64_t M, N, K, block_rows, block_columns;

  int32_t chunks() const { return cuda::narrow(K / kChunk); }
  int32_t scales() const { return cuda::narrow(ceil_div(K, block_columns)); }
  // Whether no tile of the kernels lies in two blocks.
  bool holds_tiles() const {
    return K % kChunk == 0 && block_rows % kTileRows == 0 && block_columns % kTileColumns == 0 &&
           next_power_of_2(block_columns) == block_columns;
  }
  int32_t column_shift() const {
    int32_t shift = 0;
    while ((int64_t{8} << shift) < block_columns) ++shift;
    return shift;
  }

  // One or two rows, whose weight is asked for before the launch ahead of them has ended.
  void vectors() const {
    using Gemv = kernels::fp8_gemv;
    const Gemv::Dims dims{.columns = N, .rows = M};
    gpu.launch<Gemv>(gpu.choose<Gemv>(dims), dims,
                     {.x_ptr = x,
                      .weight_ptr = weight,
                      .scale_ptr = scale,
                      .bias_ptr = added.bias_or(x),
                      .residual_ptr = added.residual_or(x),
                      .out_ptr = y,
                      .columns = cuda::narrow(N),
                      .chunks = chunks(),
                      .scales = scales(),
                      .block_rows = cuda::narrow(block_rows),
                      .column_shift = column_shift(),
                      .with_bias = added.with_bias(),
                      .with_residual = added.with_residual()},
                     constant);
  }

  // Some.
  void tiles() const {
    using Gemm = kernels::fp8_gemm;
    const Gemm::Dims dims{.columns = N, .rows = M, .tiles64 = ceil_div(N, 64)};
    const Row& row = gpu.choose<Gemm>(dims);
    const int64_t splits = row.constants[Gemm::SPLITS];
    const kernels::fp8_gemm_workspace workspace{.SPLITS = splits, .columns = N, .rows = M};
    void* const parts = splits > 1 ? gpu.scratch(workspace.parts_bytes()) : nullptr;
    gpu.launch<Gemm>(row, dims,
                     {.x_ptr = x,
                      .weight_ptr = weight,
                      .scale_ptr = scale,
                      .bias_ptr = added.bias_or(x),
                      .residual_ptr = added.residual_or(x),
                      .out_ptr = y,
                      .part_ptr = parts,
                      .rows = cuda::narrow(M),
                      .columns = cuda::narrow(N),
                      .chunks = chunks(),
                      .scales = scales(),
                      .block_rows = cuda::narrow(block_rows),
                      .block_columns = cuda::narrow(block_columns),
                      .with_bias = added.with_bias(),
                      .with_residual = added.with_residual()});
    if (splits > 1) cuda::sum_parts(gpu, parts, splits, M, N, added, y);
  }

  // Many.
  void unpacked() const {
    using Unpack = kernels::fp8_unpack;
    cuda::unpacked_product(gpu, x, M, N, K, added, y, [&](int64_t first, int64_t rows, void* part) {
      const Unpack::Dims dims{.chunks = chunks(), .part = rows};
      gpu.launch<Unpack>(gpu.choose<Unpack>(dims), dims,
                         {.weight_ptr = weight,
                          .scale_ptr = scale,
                          .out_ptr = part,
                          .first = cuda::narrow(first),
                          .chunks = chunks(),
                          .scales = scales(),
                          .block_rows = cuda::narrow(block_rows),
                          .block_columns = cuda::narrow(block_columns)});
    });
  }

  // Any depth and any blocks.
  void any() const {
    using Any = kernels::fp8_any;
    const Any::Dims dims{.columns = N, .rows = M};
    gpu.launch<Any>(gpu.choose<Any>(dims), dims,
                    {.x_ptr = x,
                     .weight_ptr = weight,
                     .scale_ptr = scale,
                     .bias_ptr = added.bias_or(x),
                     .residual_ptr = added.residual_or(x),
                     .out_ptr = y,
                     .rows = cuda::narrow(M),
                     .columns = cuda::narrow(N),
                     .depth = cuda::narrow(K),
                     .scales = scales(),
                     .block_rows = cuda::narrow(block_rows),
                     .block_columns = cuda::narrow(block_columns),
                     .with_bias = added.with_bias(),
                     .with_residual = added.with_residual()});
  }
};

}  // namespace

void compute(Call& call) {
  cuda::Gpu gpu(call);
  const Product product{gpu,
                        call.input(input::x).data,
                        call.input(input::weight).data,
                        call.input(input::scale_inv).data,
                        call.is_constant(input::weight) && call.is_constant(input::scale_inv),
                        {call.input(input::bias).data, call.input(input::residual).data},
                        call.output(output::y).data,
                        call.value(name::T),
                        call.value(name::N),
                        call.value(name::K),
                        call.value(name::block_rows),
                        call.value(name::block_columns)};
  if (!product.holds_tiles()) return product.any();
  if (product.M <= kVectorRows) return product.vectors();
  if (product.M <= kTiledRows) return product.tiles();
  product.unpacked();
}

}  // namespace piccard::matmul_fp8_block

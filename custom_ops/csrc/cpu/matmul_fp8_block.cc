#include "operators.generated.h"
#include "weight.h"

namespace piccard::matmul_fp8_block {

namespace {

class Fp8Weight : public PackedWeight {
 public:
  Fp8Weight(const uint8_t* data, const float* scales, int64_t columns, int64_t block_rows, int64_t block_columns)
      : PackedWeight(columns),
        data_(data),
        scales_(scales),
        columns_(columns),
        block_rows_(block_rows),
        block_columns_(block_columns) {}

 protected:
  void unpack(int64_t row, int64_t first, int64_t count, float* out) const override {
    const float* scales = scales_ + row / block_rows_ * ceil_div(columns_, block_columns_);
    for (int64_t k = first; k < first + count;) {
      const int64_t block = k / block_columns_;
      const int64_t part = min((block + 1) * block_columns_, first + count) - k;
      isa().fp8(data_ + row * columns_ + k, scales[block], out + k - first, part);
      k += part;
    }
  }

 private:
  const uint8_t* data_;
  const float* scales_;
  int64_t columns_, block_rows_, block_columns_;
};

}  // namespace

void compute(Call& call) {
  const int64_t T = call.value(name::T), K = call.value(name::K), N = call.value(name::N);
  const Floats x(call.input(input::x)), bias(call.input(input::bias)), residual(call.input(input::residual));
  const Fp8Weight weight(call.input(input::weight).as<uint8_t>(), call.input(input::scale_inv).as<float>(), K,
                         call.value(name::block_rows), call.value(name::block_columns));
  Result y(call, output::y);
  linear(call, x.data(), T, K, weight, N, bias.data(), residual.data(), y.data());
  y.finish();
}

}  // namespace piccard::matmul_fp8_block

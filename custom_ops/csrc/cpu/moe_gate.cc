#include <vector>

#include "error.h"
#include "operators.generated.h"
#include "weight.h"

namespace piccard::moe_gate {

namespace {

// Indices of the `count` largest of those that may be chosen, best first; of equal ones the first. A value that is not
// a number is smaller than any other, so that there are always enough.
void largest(const float* values, int64_t size, const uint8_t* barred, int64_t count, int64_t* chosen) {
  std::vector<uint8_t> taken(barred, barred + size);
  for (int64_t k = 0; k < count; ++k) {
    int64_t best = -1;
    for (int64_t i = 0; i < size; ++i) {
      if (taken[static_cast<size_t>(i)]) continue;
      if (best < 0 || values[i] > values[best] || (values[best] != values[best] && values[i] == values[i])) best = i;
    }
    taken[static_cast<size_t>(best)] = 1;
    chosen[k] = best;
  }
}

// A group's score: its best expert's, or the sum of its two best.
float group_score(const float* scores, int64_t size, bool two) {
  float first = scores[0], second = 0;
  for (int64_t i = 1; i < size; ++i) {
    const float score = scores[i];
    if (score > first) {
      second = first;
      first = score;
    } else if (i == 1 || score > second) {
      second = score;
    }
  }
  return two && size > 1 ? first + second : first;
}

}  // namespace

void compute(Call& call) {
  const int64_t T = call.value(name::T), E = call.value(name::E), K = call.value(name::num_experts_per_tok);
  const int64_t groups = call.value(name::n_group), kept = call.value(name::topk_group), width = E / groups;
  const int64_t method = call.value(name::topk_method), shared = call.value(name::n_shared_experts), width_out = K + shared;
  const bool sigmoid = method == topk_method::noaux_tc;
  if (sigmoid && !call.input(input::bias).present()) fail("topk_method noaux_tc needs the input bias");
  if (method == topk_method::greedy && groups != 1) fail("topk_method greedy knows no groups: n_group has to be 1");
  const int64_t D = call.value(name::D);
  const Floats x(call.input(input::x));
  const std::unique_ptr<Weight> router = float_weight(call, input::weight, 0);
  std::unique_ptr<float[]> logits(new float[static_cast<size_t>(T * E)]);
  linear(call, x.data(), T, D, *router, E, nullptr, nullptr, logits.get());
  const auto* slots = call.input(input::slots).as<int64_t>();
  const auto* bias = call.input(input::bias).as<float>();
  auto* weights = static_cast<float*>(call.output(output::weights).data);
  auto* experts = static_cast<int32_t*>(call.output(output::experts).data);
  const size_t experts_size = static_cast<size_t>(E);
  std::vector<float> scores(experts_size), biased(experts_size), group_scores(static_cast<size_t>(groups));
  std::vector<uint8_t> barred(experts_size), no_group(static_cast<size_t>(groups));
  std::vector<int64_t> chosen_groups(static_cast<size_t>(kept)), chosen(static_cast<size_t>(K));
  for (int64_t t = 0; t < T; ++t) {
    const float* row = logits.get() + t * E;
    if (sigmoid) {
      isa().sigmoid(row, scores.data(), E);
    } else {
      scores.assign(row, row + E);
      isa().softmax(scores.data(), E, 1.0f);
    }
    biased = scores;
    if (sigmoid) isa().added(bias, biased.data(), E);
    std::fill(barred.begin(), barred.end(), uint8_t{0});
    if (kept < groups) {
      for (int64_t g = 0; g < groups; ++g) {
        group_scores[static_cast<size_t>(g)] = group_score(biased.data() + g * width, width, sigmoid);
      }
      largest(group_scores.data(), groups, no_group.data(), kept, chosen_groups.data());
      std::fill(barred.begin(), barred.end(), uint8_t{1});
      for (const int64_t g : chosen_groups) std::fill_n(barred.begin() + g * width, width, uint8_t{0});
    }
    float* own_weights = weights + t * width_out;
    int32_t* own = experts + t * width_out;
    largest(biased.data(), E, barred.data(), K, chosen.data());
    float sum = 0;
    for (int64_t k = 0; k < K; ++k) {
      const int64_t expert = chosen[static_cast<size_t>(k)];
      sum += own_weights[k] = scores[static_cast<size_t>(expert)];
      own[k] = static_cast<int32_t>(expert);
    }
    float factor = call.real(real::routed_scaling_factor);
    if (call.value(name::norm_topk_prob)) factor /= sum + 1e-20f;
    for (int64_t k = 0; k < K; ++k) own_weights[k] *= factor;
    for (int64_t k = 0; k < shared; ++k) {
      own_weights[K + k] = 1.0f;
      own[K + k] = static_cast<int32_t>(E + k);
    }
    // A padded row chooses no expert, so that none is read for it.
    if (slots != nullptr && slots[t] < 0) std::fill_n(own, width_out, -1);
  }
}

}  // namespace piccard::moe_gate

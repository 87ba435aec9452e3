// The operator for PyTorch: loaded by torch.ops.load_library, which runs the registrations below.
#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "leaky_sum.h"

namespace {

at::Tensor leaky_sum_cpu(const at::Tensor& x, double leak) {
  TORCH_CHECK(x.dim() > 0, "leaky_sum: x needs at least one dimension");
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble,
      "leaky_sum: x must be float32 or float64, got ", x.scalar_type());
  at::Tensor input = x.contiguous();
  at::Tensor output = at::empty_like(input);
  const int64_t steps = input.size(-1);
  const int64_t rows = steps == 0 ? 0 : input.numel() / steps;
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "leaky_sum", [&] {
    leaky_sum(input.const_data_ptr<scalar_t>(), output.mutable_data_ptr<scalar_t>(), rows, steps,
              static_cast<scalar_t>(leak));
  });
  return output;
}

}  // namespace

TORCH_LIBRARY(example_cpp, m) { m.def("leaky_sum(Tensor x, float leak) -> Tensor"); }

TORCH_LIBRARY_IMPL(example_cpp, CPU, m) { m.impl("leaky_sum", &leaky_sum_cpu); }

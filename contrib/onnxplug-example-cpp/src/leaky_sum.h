// The operator itself, shared by the PyTorch and the ONNX Runtime library: y[t] = x[t] + leak * y[t - 1].
#pragma once

#include <cstdint>

template <typename T>
void leaky_sum(const T* x, T* y, int64_t rows, int64_t steps, T leak) {
  for (int64_t row = 0; row < rows; ++row) {
    T sum = 0;
    for (int64_t t = 0; t < steps; ++t) {
      sum = x[row * steps + t] + leak * sum;
      y[row * steps + t] = sum;
    }
  }
}

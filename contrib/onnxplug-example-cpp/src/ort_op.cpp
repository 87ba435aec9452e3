// The operator's kernels for ONNX Runtime: onnxplug.example::LeakySum for float and double.
#include <exception>
#include <new>
#include <vector>

#include "leaky_sum.h"
#include "ort_abi.h"

namespace {

constexpr uint32_t kApiVersion = 16;
#ifndef EXAMPLE_DOMAIN
#define EXAMPLE_DOMAIN "onnxplug.example"
#endif
#ifndef EXAMPLE_OP
#define EXAMPLE_OP "LeakySum"
#endif

#define RETURN_IF_ERROR(call) \
  if (OrtStatusPtr status = (call)) return status

template <typename T>
constexpr ONNXTensorElementDataType kElementType =
    sizeof(T) == 4 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE;

struct Kernel {
  const OrtApi* api;
  float leak;
};

OrtStatusPtr create(const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
  float leak = 0;
  RETURN_IF_ERROR(api->KernelInfoGetAttribute_float(info, "leak", &leak));
  *kernel = new (std::nothrow) Kernel{api, leak};
  return *kernel ? nullptr : api->CreateStatus(ORT_FAIL, "LeakySum: out of memory");
}

OrtStatusPtr dimensions(const OrtApi* api, const OrtValue* value, std::vector<int64_t>& dims) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  RETURN_IF_ERROR(api->GetTensorTypeAndShape(value, &info));
  size_t rank = 0;
  OrtStatusPtr status = api->GetDimensionsCount(info, &rank);
  if (!status) {
    dims.resize(rank);
    status = api->GetDimensions(info, dims.data(), rank);
  }
  api->ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

template <typename T>
OrtStatusPtr run(const Kernel& kernel, OrtKernelContext* context) {
  const OrtApi* api = kernel.api;
  const OrtValue* x = nullptr;
  RETURN_IF_ERROR(api->KernelContext_GetInput(context, 0, &x));
  std::vector<int64_t> dims;
  RETURN_IF_ERROR(dimensions(api, x, dims));
  if (dims.empty()) return api->CreateStatus(ORT_INVALID_ARGUMENT, "LeakySum: x needs at least one dimension");
  OrtValue* y = nullptr;
  RETURN_IF_ERROR(api->KernelContext_GetOutput(context, 0, dims.data(), dims.size(), &y));
  void* from = nullptr;
  void* to = nullptr;
  RETURN_IF_ERROR(api->GetTensorMutableData(const_cast<OrtValue*>(x), &from));
  RETURN_IF_ERROR(api->GetTensorMutableData(y, &to));
  int64_t rows = 1;
  for (size_t axis = 0; axis + 1 < dims.size(); ++axis) rows *= dims[axis];
  leaky_sum(static_cast<const T*>(from), static_cast<T*>(to), rows, dims.back(), static_cast<T>(kernel.leak));
  return nullptr;
}

// No C++ exception may cross into ONNX Runtime.
template <typename T>
OrtStatusPtr compute(void* kernel, OrtKernelContext* context) {
  const Kernel& self = *static_cast<Kernel*>(kernel);
  try {
    return run<T>(self, context);
  } catch (const std::exception& error) {
    return self.api->CreateStatus(ORT_FAIL, error.what());
  }
}

template <typename T>
OrtCustomOp make_op() {
  OrtCustomOp op = {};
  op.version = kApiVersion;
  op.GetName = [](const OrtCustomOp*) { return EXAMPLE_OP; };
  op.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  op.GetInputType = [](const OrtCustomOp*, size_t) { return kElementType<T>; };
  op.GetOutputType = [](const OrtCustomOp*, size_t) { return kElementType<T>; };
  op.GetInputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_REQUIRED; };
  op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute<T>;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return op;
}

}  // namespace

// What ONNX Runtime looks for in a library of custom operators. The domain must outlive every session: it is made once
// and never released.
extern "C" __attribute__((visibility("default"))) OrtStatusPtr RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  static const OrtCustomOp ops[] = {make_op<float>(), make_op<double>()};
  static OrtCustomOpDomain* domain = nullptr;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (!api) return nullptr;  // ONNX Runtime before 1.16: it says itself that the operator is not registered
  if (!domain) {
    OrtCustomOpDomain* made = nullptr;
    RETURN_IF_ERROR(api->CreateCustomOpDomain(EXAMPLE_DOMAIN, &made));
    for (const OrtCustomOp& op : ops) {
      if (OrtStatusPtr status = api->CustomOpDomain_Add(made, &op)) {
        api->ReleaseCustomOpDomain(made);
        return status;
      }
    }
    domain = made;
  }
  return api->AddCustomOpDomain(options, domain);
}

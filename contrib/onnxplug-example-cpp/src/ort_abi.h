// The part of ONNX Runtime's C interface that a custom operator needs.
//
// The onnxruntime package carries no headers. The interface is a table of function pointers whose positions never change
// (functions are only ever added at its end), so that the few that are used can be declared by their positions. With ONNX
// Runtime's own headers at hand, include onnxruntime_c_api.h instead: the names are the same.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;
struct OrtCustomOp;

typedef OrtStatus* OrtStatusPtr;

// Values of ONNX's own TensorProto.DataType, and of ONNX Runtime's enumerations.
enum ONNXTensorElementDataType { ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE = 11 };
enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 };
enum OrtCustomOpInputOutputCharacteristic { INPUT_OUTPUT_REQUIRED = 0, INPUT_OUTPUT_OPTIONAL, INPUT_OUTPUT_VARIADIC };
enum OrtMemType { OrtMemTypeDefault = 0 };

struct OrtApi {
  OrtStatusPtr (*CreateStatus)(OrtErrorCode code, const char* message);  // 0
  void* unused_1[25];
  OrtStatusPtr (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);  // 26
  OrtStatusPtr (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);
  OrtStatusPtr (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
  void* unused_29[22];
  OrtStatusPtr (*GetTensorMutableData)(OrtValue* value, void** out);  // 51
  void* unused_52[9];
  OrtStatusPtr (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, size_t* out);  // 61
  OrtStatusPtr (*GetDimensions)(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t count);
  void* unused_63[2];
  OrtStatusPtr (*GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** out);  // 65
  void* unused_66[19];
  OrtStatusPtr (*KernelInfoGetAttribute_float)(const OrtKernelInfo* info, const char* name, float* out);  // 85
  void* unused_86[4];
  OrtStatusPtr (*KernelContext_GetInput)(const OrtKernelContext* context, size_t index, const OrtValue** out);  // 90
  OrtStatusPtr (*KernelContext_GetOutput)(
      OrtKernelContext* context, size_t index, const int64_t* dims, size_t count, OrtValue** out);
  void* unused_92[7];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info);  // 99
  void* unused_100;
  void (*ReleaseCustomOpDomain)(OrtCustomOpDomain* domain);  // 101
};
static_assert(offsetof(OrtApi, CreateCustomOpDomain) == 26 * sizeof(void*), "OrtApi");
static_assert(offsetof(OrtApi, GetTensorMutableData) == 51 * sizeof(void*), "OrtApi");
static_assert(offsetof(OrtApi, GetDimensionsCount) == 61 * sizeof(void*), "OrtApi");
static_assert(offsetof(OrtApi, GetTensorTypeAndShape) == 65 * sizeof(void*), "OrtApi");
static_assert(offsetof(OrtApi, KernelInfoGetAttribute_float) == 85 * sizeof(void*), "OrtApi");
static_assert(offsetof(OrtApi, KernelContext_GetInput) == 90 * sizeof(void*), "OrtApi");
static_assert(offsetof(OrtApi, ReleaseTensorTypeAndShapeInfo) == 99 * sizeof(void*), "OrtApi");
static_assert(offsetof(OrtApi, ReleaseCustomOpDomain) == 101 * sizeof(void*), "OrtApi");

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// As of version 16 (ONNX Runtime 1.16); ONNX Runtime reads no further than the version that stands in the first field.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info);
  const char* (*GetName)(const OrtCustomOp* op);
  const char* (*GetExecutionProviderType)(const OrtCustomOp* op);
  ONNXTensorElementDataType (*GetInputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp* op);
  ONNXTensorElementDataType (*GetOutputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
  void (*KernelCompute)(void* kernel, OrtKernelContext* context);
  void (*KernelDestroy)(void* kernel);
  OrtCustomOpInputOutputCharacteristic (*GetInputCharacteristic)(const OrtCustomOp* op, size_t index);
  OrtCustomOpInputOutputCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp* op, size_t index);
  OrtMemType (*GetInputMemoryType)(const OrtCustomOp* op, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp* op);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp* op);
  OrtStatusPtr (*CreateKernelV2)(
      const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel);
  OrtStatusPtr (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
};

}  // extern "C"

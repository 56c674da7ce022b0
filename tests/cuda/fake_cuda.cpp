// A driver and an NVRTC that do nothing but note how they are called, for tests without a GPU.
//
// There are `fake.devices` devices of compute capability 9.0. The primary context of device d has
// the address 100 + d. "Machine code" is the text of a program and of its headers.
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Fake {
  int init_code = 0;
  int driver_version = 12040;
  int devices = 2;
  int nvrtc_major = 12;
  int compiled = 0;     // programs
  int allowed = 0;      // bytes of shared memory that were asked for
  int allowances = 0;   // how often it was asked for
  int launches = 0;     //
  int launch_code = 0;  // what a launch answers
  int grid = 0, block = 0, shared = 0;
  int64_t stream = 0, context = 0, first_word = 0;
};
EXPORT Fake fake;
Fake fake;

static thread_local std::vector<int64_t> contexts;

EXPORT int64_t fake_context() { return contexts.empty() ? 0 : contexts.back(); }

// ---- Driver

EXPORT int cuInit(unsigned) { return fake.init_code; }
EXPORT int cuDriverGetVersion(int* version) {
  *version = fake.driver_version;
  return 0;
}
EXPORT int cuGetErrorName(int code, const char** name) {
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
EXPORT int cuGetErrorString(int code, const char** words) {
  *words = code == 100 ? "no CUDA-capable device is detected" : "invalid argument";
  return 0;
}
EXPORT int cuDeviceGetCount(int* count) {
  *count = fake.devices;
  return 0;
}
EXPORT int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}
EXPORT int cuDeviceGetName(char* name, int size, int device) {
  std::strncpy(name, ("Fake " + std::to_string(device)).c_str(), size);
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 16:
      *value = 132;
      return 0;
    case 75:
      *value = 9;
      return 0;
    case 76:
      *value = 0;
      return 0;
    case 81:
      *value = 233472;
      return 0;
    case 97:
      *value = 232448;
      return 0;
    default:
      return 1;
  }
}
EXPORT int cuDevicePrimaryCtxRetain(int64_t* context, int device) {
  *context = 100 + device;
  return 0;
}
EXPORT int cuCtxGetCurrent(int64_t* context) {
  *context = fake_context();
  return 0;
}
EXPORT int cuCtxPushCurrent_v2(int64_t context) {
  contexts.push_back(context);
  return 0;
}
EXPORT int cuCtxPopCurrent_v2(int64_t* context) {
  *context = fake_context();
  contexts.pop_back();
  return 0;
}
EXPORT int cuModuleLoadData(int64_t* module, const char*) {
  *module = 1000 + fake_context();
  return 0;
}
EXPORT int cuModuleGetFunction(int64_t* function, int64_t module, const char* name) {
  *function = 1000 + module;
  return std::strcmp(name, "absent") == 0 ? 500 : 0;
}
EXPORT int cuFuncGetAttribute(int* value, int attribute, int64_t) {
  *value = attribute == 4 ? 40 : attribute == 3 ? 8 : 0;
  return 0;
}
EXPORT int cuFuncSetAttribute(int64_t, int attribute, int value) {
  fake.allowed = value;
  fake.allowances += 1;
  return attribute == 8 ? 0 : 1;
}
EXPORT int cuLaunchKernel(int64_t, unsigned grid, unsigned, unsigned, unsigned block, unsigned,
                          unsigned, unsigned shared, int64_t stream, void** parameters, void**) {
  fake.launches += 1;
  fake.grid = grid;
  fake.block = block;
  fake.shared = shared;
  fake.stream = stream;
  fake.context = fake_context();
  std::memcpy(&fake.first_word, parameters[0], sizeof(fake.first_word));
  return fake.launch_code;
}
EXPORT int cuStreamSynchronize(int64_t stream) {
  fake.stream = stream;
  fake.context = fake_context();
  return fake.launch_code;
}

// ---- NVRTC

struct Program {
  std::string text, log;
};

EXPORT const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR"; }
EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = fake.nvrtc_major;
  *minor = 4;
  return 0;
}
EXPORT int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return 0;
}
EXPORT int nvrtcGetSupportedArchs(int* known) {
  const int all[] = {80, 86, 90};
  std::memcpy(known, all, sizeof(all));
  return 0;
}
EXPORT int nvrtcCreateProgram(Program** program, const char* text, const char*, int count,
                              const char** headers, const char** names) {
  *program = new Program{text, ""};
  for (int i = 0; i < count; ++i) (*program)->text += std::string(names[i]) + headers[i];
  return 0;
}
EXPORT int nvrtcCompileProgram(Program* program, int count, const char** options) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> alone(mutex);
  fake.compiled += 1;
  for (int i = 0; i < count; ++i) program->text += options[i];
  program->log = "variant.cu(1): wrong";
  return program->text.find("#error") == std::string::npos ? 0 : 6;
}
EXPORT int nvrtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return 0;
}
EXPORT int nvrtcGetProgramLog(Program* program, char* log) {
  std::strcpy(log, program->log.c_str());
  return 0;
}
EXPORT int nvrtcGetCUBINSize(Program* program, size_t* size) {
  *size = program->text.size();
  return 0;
}
EXPORT int nvrtcGetCUBIN(Program* program, char* code) {
  std::memcpy(code, program->text.data(), program->text.size());
  return 0;
}
EXPORT int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}

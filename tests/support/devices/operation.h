/* operation.h - run an operation of torch on tensors of one device. */
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/stack.h>
#include <ATen/CPUGeneratorImpl.h>

namespace devices
{
using namespace at;

constexpr DeviceIndex N_DEVICES = 10;

/* Run any operation: torch calls this as the kernel of each. */
void run(const c10::OperatorHandle &op, torch::jit::Stack *stack);

/* Copy values between tensors of one shape, on any devices. */
void copy_values(const Tensor &from, const Tensor &to);

Generator default_generator(DeviceIndex index);
DeviceIndex current_device();
/* Memory of the CPU as a device's; it is watched until it is freed. */
c10::DataPtr data_over(const c10::Storage &memory, Device device);
c10::Allocator *allocator();
} // namespace devices

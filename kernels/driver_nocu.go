//go:build !gpu

package kernels

import "fmt"

// GPUBuild reports whether this build has the driver layer for NVIDIA GPUs (tag gpu).
const GPUBuild = false

// noCUDA says why there is no cuda device.
func noCUDA(Options) string { return "this build has no GPU driver layer (make gpu)" }

// openCUDA answers for devices whose kernels are not part of this build.
func openCUDA(name string, _ Options) (driver, error) {
	return nil, &Error{
		Op:   "open device",
		Err:  fmt.Errorf("%q: this build has no GPU driver layer: %w", name, ErrNoDevice),
		Hint: "run with --device cpu, or build with make gpu",
	}
}

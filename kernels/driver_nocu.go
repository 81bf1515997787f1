//go:build !gpu

package kernels

import "fmt"

// GPUBuild reports whether this build has the driver layer for NVIDIA GPUs (tag gpu).
const GPUBuild = false

// openCUDA answers for devices whose kernels are not part of this build.
func openCUDA(name string, _ Options) (driver, error) {
	return nil, &Error{
		Op:   "open device",
		Err:  fmt.Errorf("%q: this build has no GPU driver layer: %w", name, ErrNoDevice),
		Hint: "run with --device cpu, or build with make gpu",
	}
}

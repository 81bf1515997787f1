package kernels

import "fmt"

// openCUDA answers for devices whose kernels are not part of this build.
func openCUDA(name string) (driver, error) {
	return nil, &Error{
		Op:   "open device",
		Err:  fmt.Errorf("%q: this build has only the cpu kernels: %w", name, ErrNoDevice),
		Hint: "run with --device cpu",
	}
}

package kernels

// Auto is the device that "auto" stands for and why: "cuda:0" when this build has the driver layer, a driver shows a GPU and libhs_cuda.so is
// there, else "cpu". It opens neither; what then fails to open is an error, never another device.
func Auto(o Options) (name, why string) {
	if why := noCUDA(o); why != "" {
		return "cpu", why
	}
	return "cuda:0", "a GPU, its driver and libhs_cuda.so are there"
}

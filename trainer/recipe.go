package trainer

import (
	"strings"

	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
)

// StorageOf is the type that a word of model.dtype stands for on a device, by the name that it is opened with: auto is bfloat16 on cuda and
// emu, which store it, and float32 elsewhere.
func StorageOf(dtype, device string) kernels.DType {
	if dtype == "bfloat16" || dtype != "float32" && onGPU(device) {
		return kernels.BF16
	}
	return kernels.F32
}

// onGPU reports whether a device, by the name that it is opened with, has the CUDA kernels.
func onGPU(device string) bool { return device == "emu" || strings.HasPrefix(device, "cuda") }

// word is the type in model.dtype.
func word(t kernels.DType) string {
	return map[kernels.DType]string{kernels.F32: "float32", kernels.BF16: "bfloat16"}[t]
}

// DType is the type of weights, activations and caches.
func (c Config) DType() kernels.DType { return StorageOf(c.Model.DType, c.Model.Device) }

// master is how the optimiser stores the weights: fp32 or hilo.
func (c Config) master() string {
	switch {
	case c.Optim.Master != "auto":
		return c.Optim.Master
	case c.DType() == kernels.BF16:
		return "hilo"
	}
	return "fp32"
}

// Fixed replaces what "auto" leaves to the device by what it stands for, so that a run goes on with the same numbers elsewhere.
func (c Config) Fixed() Config {
	c.Optim.Master = c.master()
	c.Model.DType = word(c.DType())
	return c
}

// Recipe is how the optimiser stores what it trains. Stochastic rounding has its own stream of random bits under the run's seed.
func (c Config) Recipe() model.Recipe {
	states := map[string]kernels.State{"bf16": kernels.StateBF16, "8bit": kernels.StateU8}
	return model.Recipe{
		States: states[c.Optim.States], HiLo: c.master() == "hilo",
		Seed: KeyOf(harness.RNGKey{Seed: c.Run.Seed, Phase: "optim"}).Lo,
	}
}

// optimArena is an arena of the optimiser under its name in a checkpoint. Lower halves of split weights are none of them: the model folder
// holds the joined masters.
type optimArena struct {
	name string
	kind model.StateKind
}

func (c OptimConfig) arenas() []optimArena {
	as := []optimArena{{"m", model.MomentM}, {"v", model.MomentV}}
	if c.States == "8bit" {
		as = append(as, optimArena{"m_scale", model.ScaleM}, optimArena{"v_scale", model.ScaleV})
	}
	return as
}

// momentSize is the bytes of a parameter's moment, without the scales.
func (c OptimConfig) momentSize() int {
	switch c.States {
	case "bf16":
		return 2
	case "8bit":
		return 1
	}
	return 4
}

// checkpointBytes is about what a checkpoint with so many bytes of float32 weights takes: these and two moments.
func (c OptimConfig) checkpointBytes(weights int) int64 {
	return int64(weights) + 2*int64(weights)*int64(c.momentSize())/4
}

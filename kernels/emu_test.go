package kernels

// Tests on the emulated CUDA kernels: every test that runs through eachRig or eachEmu also runs there, in F32 and BF16, under several
// fiber orders that must give the same bits, with shared memory poisoned and every buffer against an unmapped page.
//
// In a build with the tag gpu, HS_TEST_DEVICE=cuda:0 names a true GPU in the emulator's place: the same tests, twice in the place of fiber
// orders, outputs full of NaN as ever, no guard pages, float32 bounds of tolOf. The emulator's own tests are skipped then.

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
)

// gpuDevice is the GPU that stands in the emulator's place, "" = none.
func gpuDevice() string { return os.Getenv("HS_TEST_DEVICE") }

// holdGPU keeps the GPU's context for the life of the process: each test opens the device anew.
var holdGPU = sync.OnceValue(func() error {
	_, err := Open(gpuDevice(), Options{LibDir: emuDir(), ArenaBytes: 1 << 20})
	return err
})

// testArena is the memory of a GPU that a test gets unless it asks for more.
const testArena = 128 << 20

// testDevice opens the emulator, or the GPU in its place.
func testDevice(t testing.TB, o Options) *Device {
	t.Helper()
	name := "emu"
	o.LibDir = emuDir()
	if gpu := gpuDevice(); gpu != "" {
		if err := holdGPU(); err != nil {
			t.Fatalf("HS_TEST_DEVICE=%s: %v", gpu, err)
		}
		if name = gpu; o.ArenaBytes == 0 {
			o.ArenaBytes = testArena
		}
	} else {
		needEmu(t, "libhs_emu.so")
	}
	d, err := Open(name, o)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// emuDir is the folder of the emulator's libraries: HS_LIB_DIR, or build/ of the repository.
func emuDir() string {
	if d := os.Getenv("HS_LIB_DIR"); d != "" {
		return d
	}
	return filepath.Join("..", "build")
}

// needEmu skips the test when a library is missing or older than a kernel's source.
func needEmu(t testing.TB, lib string) {
	t.Helper()
	if gpuDevice() != "" {
		t.Skip("the emulator's own test, without HS_TEST_DEVICE: make emu && go test ./kernels")
	}
	at, err := os.Stat(filepath.Join(emuDir(), lib))
	if errors.Is(err, os.ErrNotExist) {
		t.Skipf("no %s: make emu", filepath.Join(emuDir(), lib))
	} else if err != nil {
		t.Fatal(err)
	}
	for _, pattern := range []string{"abi.h", "optim_math.h", "cuda/*.cu", "cuda/*.cuh", "emu/*.cpp", "emu/*.h"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if s, err := os.Stat(f); err == nil && s.ModTime().After(at.ModTime()) {
				t.Skipf("%s is older than %s: make emu", lib, f)
			}
		}
	}
}

// fiberOrders are the orders that the emulator's threads run in; a GPU's are its own, so there the same twice.
func fiberOrders() []string {
	if gpuDevice() != "" {
		return []string{"forward", "again"}
	}
	return []string{"forward", "reverse", "random:7"}
}

func emuRig(t testing.TB, dt DType, order string) *rig {
	t.Helper()
	return rigOn(t, testDevice(t, Options{Emu: EmuOptions{FiberOrder: order, Poison: true, Guard: true}}), dt)
}

// eachEmu runs fn on the emulator in F32 and BF16 under every fiber order and requires the same bits of everything that fn downloads.
// fn is skipped at the first op that the table has no kernel for.
func eachEmu(t *testing.T, fn func(t *testing.T, r *rig)) {
	for _, dt := range []DType{F32, BF16} {
		t.Run(fmt.Sprintf("%s/%v", cmp.Or(gpuDevice(), "emu"), dt), func(t *testing.T) {
			var want []uint64
			for _, order := range fiberOrders() {
				r := emuRig(t, dt, order)
				fn(t, r)
				r.close()
				if order == "forward" {
					want = r.log
				} else if !slices.Equal(r.log, want) {
					t.Errorf("order %s gives other bits than forward: a barrier is missing, or a sum has no fixed order", order)
				}
			}
		})
	}
}

// eachForm is eachEmu once with wgmma and once without.
func eachForm(t *testing.T, fn func(t *testing.T, r *rig)) {
	for _, form := range []string{"own", "mma"} {
		t.Run(form, func(t *testing.T) {
			eachEmu(t, func(t *testing.T, r *rig) {
				if err := r.dev.configure("gemm", form); err != nil {
					t.Fatal(err)
				}
				fn(t, r)
			})
		})
	}
}

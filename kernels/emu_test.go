package kernels

// Tests on the emulated CUDA kernels: every test that runs through eachRig or eachEmu also runs there, in F32 and BF16, under several
// fiber orders that must give the same bits, with shared memory poisoned and every buffer against an unmapped page.

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

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

func fiberOrders() []string { return []string{"forward", "reverse", "random:7"} }

func emuRig(t testing.TB, dt DType, order string) *rig {
	t.Helper()
	needEmu(t, "libhs_emu.so")
	return newRigOn(t, "emu", dt, Options{LibDir: emuDir(), Emu: EmuOptions{FiberOrder: order, Poison: true, Guard: true}})
}

// eachEmu runs fn on the emulator in F32 and BF16 under every fiber order and requires the same bits of everything that fn downloads.
// fn is skipped at the first op that the table has no kernel for.
func eachEmu(t *testing.T, fn func(t *testing.T, r *rig)) {
	for _, dt := range []DType{F32, BF16} {
		t.Run(fmt.Sprintf("emu/%v", dt), func(t *testing.T) {
			var want []uint64
			for _, order := range fiberOrders() {
				r := emuRig(t, dt, order)
				fn(t, r)
				r.close()
				if order == "forward" {
					want = r.log
				} else if !slices.Equal(r.log, want) {
					t.Errorf("fiber order %s gives other bits than forward: a barrier is missing, or a sum has no fixed order", order)
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

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"harness-s/env"
	"harness-s/env/dbbench"
	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
	"harness-s/trainer"
)

func abiVersion() int { return kernels.ABIVersion }

// load resolves defaults < preset < files < --set, then the global flags.
func (f configFlags) load(g *globals) (*trainer.Resolved, error) {
	var layers []trainer.Layer
	if f.Preset != "" {
		text, err := trainer.Preset(f.Preset)
		if err != nil {
			return nil, err
		}
		layers = append(layers, trainer.Layer{Name: "preset " + f.Preset, Text: text})
	}
	for _, path := range f.Config {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, exitError{code: exitUsage, err: &trainer.Error{Op: "read config", Err: err, Hint: "write one with: hs init"}}
		}
		layers = append(layers, trainer.Layer{Name: path, Text: text})
	}
	sets := f.Set
	if g.Device != "auto" {
		sets = append(sets, fmt.Sprintf("model.device=%q", g.Device))
	}
	if g.Threads != 0 {
		sets = append(sets, fmt.Sprintf("run.threads=%d", g.Threads))
	}
	res, err := trainer.Load(layers, sets)
	if err == nil { // a run on a GPU records which: its numbers are not the CPU's
		if name := g.deviceName(res.Config.Model.Device); name != "cpu" {
			res.Config.Model.Device = name
		}
	}
	return res, err
}

// auto is what the device "auto" is on this machine, and why.
func (g *globals) auto() (name, why string) {
	if g.autoName == "" {
		g.autoName, g.autoWhy = kernels.Auto(kernels.Options{LibDir: os.Getenv("HS_LIB_DIR")})
	}
	return g.autoName, g.autoWhy
}

// deviceName is the name that a device is opened by.
func (g *globals) deviceName(name string) string {
	if name != "auto" && name != "" {
		return name
	}
	g.chosen = true
	name, _ = g.auto()
	return name
}

// autoNote is a remark on why the device is the one it is, "" when it was named.
func (g *globals) autoNote() string {
	if !g.chosen {
		return ""
	}
	return " (auto: " + g.autoWhy + ")"
}

// openDevice opens the device named by the flags.
func (g *globals) openDevice() (*kernels.Device, error) { return g.device(g.Device, g.Threads, "own") }

func (g *globals) device(name string, threads int, gemm string) (*kernels.Device, error) {
	return kernels.Open(g.deviceName(name), kernels.Options{Threads: threads, Gemm: gemm, LibDir: os.Getenv("HS_LIB_DIR")})
}

// storageFlag chooses the type that a model computes in, for commands without a configuration.
type storageFlag struct {
	DType string `name:"dtype" default:"auto" enum:"auto,float32,bfloat16" help:"Type of weights, activations and caches: float32, bfloat16, or auto = float32 on the CPU, bfloat16 on cuda and emu."`
}

// options are how a model is loaded for a device; weights to train in bfloat16 keep their lower halves.
func (f storageFlag) options(g *globals, train bool) model.LoadOptions {
	dt := trainer.StorageOf(f.DType, g.deviceName(g.Device))
	return model.LoadOptions{DType: dt, Train: train, Optim: model.Recipe{HiLo: train && dt == kernels.BF16}}
}

// openAdapted loads a checkpoint with an adapter, "" = none, for commands that run the merged weights.
func (g *globals) openAdapted(dir, adapter string, o model.LoadOptions) (*kernels.Device, *model.Model, error) {
	return g.openWith(func(dev *kernels.Device) (*model.Model, error) { return loadAdapted(dir, adapter, dev, o) })
}

func (g *globals) openWith(load func(*kernels.Device) (*model.Model, error)) (*kernels.Device, *model.Model, error) {
	dev, err := g.openDevice()
	if err != nil {
		return nil, nil, err
	}
	m, err := load(dev)
	if err != nil {
		return nil, nil, errors.Join(err, dev.Close())
	}
	return dev, m, nil
}

// loadStored loads a checkpoint directory, "" = the shipped one, with weights and moments stored as o says. For an adapter directory it loads
// the base that the adapter names.
func loadStored(dir string, dev *kernels.Device, o model.LoadOptions) (*model.Model, error) {
	if dir != "" && model.IsAdapter(dir) {
		if o.Train {
			return nil, &trainer.Error{Op: "load model", Err: fmt.Errorf("%s is a LoRA adapter, training starts from a whole checkpoint", dir), Hint: "hs convert --ckpt " + dir + " --dtype f32 --out DIR"}
		}
		return loadAdapted("", dir, dev, o)
	}
	if dir != "" {
		return model.Load(dir, dev, o)
	}
	fsys, err := model.TinyFS()
	if err != nil {
		return nil, err
	}
	return model.LoadFS(fsys, dev, o)
}

// loadAdapted loads a checkpoint with an adapter to run, not to train: the weights that were trained are stored as o.Optim says, and those
// beside an adapter in o.DType. With "" for the checkpoint it is the one that the adapter names.
func loadAdapted(dir, adapter string, dev *kernels.Device, o model.LoadOptions) (*model.Model, error) {
	if adapter == "" {
		return loadStored(dir, dev, o)
	}
	if dir == "" {
		info, err := model.ReadAdapterInfo(adapter)
		if err != nil {
			return nil, err
		}
		if dir = info.Base; dir != "" && !isDir(dir) {
			return nil, &trainer.Error{Op: "load " + adapter, Err: fmt.Errorf("its base %s is not a directory here", dir), Hint: "give the base: --ckpt BASE --adapter " + adapter}
		}
	}
	if dir != "" && model.IsAdapter(dir) {
		return nil, &trainer.Error{Op: "load " + adapter, Err: fmt.Errorf("its base %s is an adapter itself", dir), Hint: "merge that one first: hs convert --ckpt " + dir + " --dtype f32 --out DIR"}
	}
	m, err := loadStored(dir, dev, model.LoadOptions{DType: o.DType})
	if err != nil {
		return nil, err
	}
	if err := m.LoadAdapter(adapter, model.AdaptOptions{Path: dir, Optim: o.Optim}); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// session is what train, eval, sft and play run on.
type session struct {
	cfg   trainer.Config
	dev   *kernels.Device
	model *model.Model
	env   env.Env
	pool  *harness.Pool
	deps  *trainer.Deps
	log   *slog.Logger
	note  string // why the device was chosen
}

// open assembles a session; load makes the model, nil loads cfg.Model.Path.
func (g *globals) open(cfg trainer.Config, train bool, log *slog.Logger, load func(*session) (*model.Model, error)) (_ *session, err error) {
	s := &session{cfg: cfg, log: log}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	if s.dev, err = g.device(cfg.Model.Device, cfg.Run.Threads, cfg.Model.Gemm); err != nil {
		return nil, err
	}
	s.note = g.autoNote()
	if train {
		if err = checkFits(cfg, s.dev); err != nil {
			return nil, err
		}
	}
	if s.env, err = openEnv(cfg); err != nil {
		return nil, err
	}
	if err = s.env.Health(context.Background()); err != nil {
		return nil, err
	}
	if train {
		if err = checkRoom(context.Background(), s.env, cfg); err != nil {
			return nil, err
		}
	}
	if s.pool, err = openPool(cfg); err != nil {
		return nil, err
	}
	if load == nil {
		load = func(s *session) (*model.Model, error) {
			if train {
				return s.policy("")
			}
			return loadStored(cfg.Model.Path, s.dev, toRun(cfg))
		}
	}
	if s.model, err = load(s); err != nil {
		return nil, err
	}
	s.deps, err = trainer.Assemble(cfg, s.model, s.env, s.pool, trainer.AssembleOptions{Train: train, Log: log})
	return s, err
}

// checkFits refuses what does not fit into the memory of a device that has a fixed one.
func checkFits(cfg trainer.Config, dev *kernels.Device) error {
	i := dev.Info()
	if i.Arena == 0 {
		return nil
	}
	b := trainer.DeviceBudget(cfg, i, 0)
	err := withPlanner(cfg.Model.Path, dev, b.Placement, func(m *model.Config, pl *model.MemoryPlanner) error {
		return trainer.CheckMemory(cfg, pl, m.NumParams(), b)
	})
	switch {
	case errors.Is(err, trainer.ErrNoFit):
		return exitError{code: exitNotReady, err: err}
	case errors.Is(err, model.ErrNoTiny): // a fresh tiny policy is being made, which fits anywhere
		return nil
	}
	return err
}

// toRun are the options of a policy that is not trained: it computes what training computes.
func toRun(cfg trainer.Config) model.LoadOptions {
	return model.LoadOptions{DType: cfg.DType(), Optim: cfg.Recipe()}
}

// policy loads the weights to train, fresh or from the model folder of a checkpoint.
func (s *session) policy(from string) (*model.Model, error) {
	return trainer.LoadPolicy(s.cfg, from, func(dir string, o model.LoadOptions) (*model.Model, error) { return loadStored(dir, s.dev, o) })
}

func (s *session) close() error {
	var errs []error
	if s.deps != nil {
		errs = append(errs, s.deps.Close())
	}
	if s.model != nil {
		s.model.Close()
	}
	if s.env != nil {
		errs = append(errs, s.env.Close())
	}
	if s.dev != nil {
		errs = append(errs, s.dev.Close())
	}
	return errors.Join(errs...)
}

// describe is the line that says what a command runs on.
func (s *session) describe() string {
	name := s.cfg.Model.Path
	if name == "" {
		name = "the shipped tiny checkpoint"
	}
	i, e := s.dev.Info(), s.env.Info()
	low := ""
	if a := s.model.Adapter; a != nil {
		low = fmt.Sprintf(", LoRA rank %d on %s: %d of its own", a.LoRA.Rank, strings.Join(a.LoRA.Targets, " "), s.model.NumTrainable())
	}
	return fmt.Sprintf("model %s (%d parameters%s) · device %s in %v, %d threads (%s)%s · %s, %s back-end", name, s.model.Config.NumParams(), low, i.Name, s.model.Params.DType, i.Threads, i.Build, s.note, e.Label, e.Backend)
}

// environments by name; later ones plug in here.
func openEnv(cfg trainer.Config) (env.Env, error) {
	if cfg.Task.Env != "dbbench" {
		return nil, exitError{code: exitUsage, err: &trainer.Error{Op: "open environment", Err: fmt.Errorf("task.env = %q, this build has: dbbench", cfg.Task.Env), Hint: "hs env ls"}}
	}
	o := dbbench.Options{Source: cfg.Task.Data, DSN: cfg.Task.DSN, Seed: cfg.Task.Seed, Train: cfg.Task.Train, Val: cfg.Task.Val, Test: cfg.Task.Test,
		MaxSteps: cfg.Rollout.MaxTurns, StepTimeout: cfg.Rollout.StepTimeout.D()}
	e, err := dbbench.New(o)
	if err != nil {
		return nil, err // e as an env.Env would not be nil
	}
	return e, nil
}

// checkRoom refuses a configuration that opens more attempts at once than the database server takes connections: they would fail one by
// one as infrastructure faults.
func checkRoom(ctx context.Context, e env.Env, cfg trainer.Config) error {
	d, ok := e.(interface {
		MaxAttempts(context.Context) (int, error)
	})
	if !ok {
		return nil
	}
	most, err := d.MaxAttempts(ctx)
	if err != nil || most == 0 {
		return err
	}
	live := cfg.Rollout.Live
	if live == 0 {
		live = 2 * cfg.Rollout.Slots
	}
	if live <= most {
		return nil
	}
	return exitError{code: exitUsage, err: &trainer.Error{
		Op:   "check database server",
		Err:  fmt.Errorf("up to %d attempts would be open at once (rollout.live, or twice rollout.slots), and the server has connections for %d", live, most),
		Hint: fmt.Sprintf("add --set rollout.live=%d, or raise max_connections of the server", most)}}
}

func openPool(cfg trainer.Config) (*harness.Pool, error) {
	if dir := cfg.Router.Pool; dir != "" {
		return harness.LoadPool(os.DirFS(filepath.Dir(dir)), filepath.Base(dir))
	}
	return harness.StarterPool(cfg.Task.Env)
}

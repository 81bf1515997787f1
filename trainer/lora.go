package trainer

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"harness-s/model"
)

// Adapter is the adapter that c asks for; ok is false when all weights are trained.
func (c LoRAConfig) Adapter() (l model.LoRA, ok bool) {
	l = model.LoRA{Rank: c.Rank, Alpha: c.Alpha, Targets: c.Targets}
	if l.Alpha == 0 {
		l.Alpha = 2 * float64(c.Rank)
	}
	return l, c.Rank > 0
}

// leastLoRARate is the learning rate below which an adapter hardly moves (pitfalls.md row 60): B starts at zero.
const leastLoRARate = 5e-6

// Caution is a remark on a rate that is too small for an adapter, "" when there is none.
func (c LoRAConfig) Caution(lr float64) string {
	if c.Rank == 0 || lr == 0 || lr >= leastLoRARate {
		return ""
	}
	return fmt.Sprintf("learning rate %g with lora.rank = %d: below %g an adapter hardly moves, 1e-5 to 5e-5 are usual", lr, c.Rank, leastLoRARate)
}

// training is how weights to train are loaded: on a GPU the gradients lie in memory that Assemble makes for sampler and executor by turns.
func (c Config) training() model.LoadOptions {
	return model.LoadOptions{DType: c.DType(), Train: true, Optim: c.Recipe(), Shared: c.Placement() == model.OnGPU}
}

// LoadPolicy loads what a run trains. from is the model folder of the checkpoint to go on from, "" for a fresh start. load reads a
// checkpoint directory, "" = the shipped one. A LoRA run reads the weights of model.path each time; its checkpoints hold the adapter, which
// names those weights by hash.
func LoadPolicy(cfg Config, from string, load func(dir string, o model.LoadOptions) (*model.Model, error)) (*model.Model, error) {
	l, on := cfg.LoRA.Adapter()
	if path := cfg.Model.Path; path != "" && model.IsAdapter(path) {
		return nil, &Error{Op: "load policy", Err: fmt.Errorf("model.path = %q is a LoRA adapter, training starts from a whole checkpoint", path),
			Hint: fmt.Sprintf("hs convert --ckpt %s --dtype f32 --out DIR, then --set model.path=DIR", path)}
	}
	if from != "" && on != model.IsAdapter(from) {
		return nil, &Error{Op: "resume run", Err: fmt.Errorf("lora.rank = %d, and %s is %s", cfg.LoRA.Rank, from, map[bool]string{true: "a whole checkpoint", false: "an adapter"}[on]),
			Hint: "resume with the configuration of the run directory"}
	}
	if !on {
		if from == "" {
			from = cfg.Model.Path
		}
		return load(from, cfg.training())
	}
	m, err := load(cfg.Model.Path, model.LoadOptions{DType: cfg.DType()})
	if err != nil {
		if from != "" {
			err = &Error{Op: "resume LoRA run", Err: fmt.Errorf("its frozen weights: %w", err), Hint: "put that checkpoint back, or name its new place with --set model.path=DIR"}
		}
		return nil, err
	}
	t := cfg.training()
	o := model.AdaptOptions{Train: true, Optim: t.Optim, Shared: t.Shared, Seed: cfg.Run.Seed, Path: cfg.Model.Path}
	if from == "" {
		err = m.Adapt(l, o)
	} else if err = m.LoadAdapter(from, o); err == nil {
		err = sameAdapter(l, m)
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// sameAdapter refuses to go on with an adapter under other keys than it was made with.
func sameAdapter(l model.LoRA, m *model.Model) error {
	was := m.Adapter.LoRA
	a, err := l.Matrices(m.Config)
	if err != nil {
		return err
	}
	b, err := was.Matrices(m.Config)
	if err != nil {
		return err
	}
	var errs []error
	if l.Rank != was.Rank {
		errs = append(errs, fmt.Errorf("lora.rank is %d, the checkpoint was made with %d", l.Rank, was.Rank))
	}
	if l.Alpha != was.Alpha {
		errs = append(errs, fmt.Errorf("lora.alpha is %g, the checkpoint was made with %g", l.Alpha, was.Alpha))
	}
	if !slices.EqualFunc(a, b, func(x, y model.TensorSpec) bool { return x.Name == y.Name }) {
		errs = append(errs, fmt.Errorf("lora.targets are %q, the checkpoint was made with %q", l.Targets, was.Targets))
	}
	if len(errs) > 0 {
		return &Error{Op: "resume run", Err: errors.Join(errs...), Hint: "resume with the configuration of the run directory"}
	}
	return nil
}

// adapterDir is where Export puts the adapter, below the merged checkpoint: beside its files, transformers would take the directory for an
// adapter without a base.
const adapterDir = model.AdapterDir

// exportModel writes m for other programs: a whole checkpoint, and its adapter as PEFT reads it.
func exportModel(m *model.Model, dir string, o model.SaveOptions) error {
	if err := m.SaveAs(dir, o); err != nil {
		return err
	}
	if m.Adapter == nil {
		return nil
	}
	return m.SaveAdapter(filepath.Join(dir, adapterDir), model.SaveAdapterOptions{})
}

package trainer

import (
	"time"

	"harness-s/model"
)

// Config is the whole configuration of a run (design.md 11). Every leaf carries
// its documentation in struct tags, which Doc lists and Validate enforces:
//
//	toml  key name
//	doc   what the key means, with its unit
//	enum  allowed words, separated by |
//	min   smallest allowed value (a leading > excludes the bound)
//	max   largest allowed value (a leading < excludes the bound)
//
// Values are plain data: a Config may be copied and compared, except for the
// family weights map and the adapter's targets, which are never written after
// loading.
type Config struct {
	Run     RunConfig     `toml:"run" doc:"identity and length of the run"`
	Model   ModelConfig   `toml:"model" doc:"the policy"`
	LoRA    LoRAConfig    `toml:"lora" doc:"a low-rank adapter that is trained in place of the weights"`
	Task    TaskConfig    `toml:"task" doc:"environment and task splits"`
	Rollout RolloutConfig `toml:"rollout" doc:"attempts, budgets and sampling"`
	Rescue  RescueConfig  `toml:"rescue" doc:"what happens to all-fail groups"`
	Router  RouterConfig  `toml:"router" doc:"choice of auxiliaries and its evidence"`
	GRPO    GRPOConfig    `toml:"grpo" doc:"advantages, loss and the gap gate"`
	Optim   OptimConfig   `toml:"optim" doc:"AdamW"`
	Save    SaveConfig    `toml:"save" doc:"checkpoints"`
	Eval    EvalConfig    `toml:"eval" doc:"scheduled evaluation under the original harness"`
	SFT     SFTConfig     `toml:"sft" doc:"warm start on demonstrations"`
}

// RunConfig names the run and bounds it.
type RunConfig struct {
	Name    string `toml:"name" doc:"name of the run directory"`
	Seed    uint64 `toml:"seed" max:"9007199254740991" doc:"seed of every keyed random stream"`
	Steps   int    `toml:"steps" min:"0" doc:"optimiser steps to run"`
	Threads int    `toml:"threads" min:"0" max:"1024" doc:"CPU threads of the kernels, 0 = all cores; results do not depend on it"`
	// A pause keeps the state in memory; what ends it is an environment that answers or a disk with space.
	PauseLimit Duration `toml:"pause_limit" min:"0s" doc:"longest pause while the environment is down or the disk is full before the run stops; 0s = wait for ever"`
}

// ModelConfig selects the policy.
type ModelConfig struct {
	Path   string `toml:"path" doc:"Hugging Face directory of a Qwen3.5 model; empty = the shipped tiny checkpoint"`
	MaxLen int    `toml:"max_len" min:"64" max:"1048576" doc:"longest episode context, in tokens"`
	Device string `toml:"device" doc:"auto, cpu, null, emu or cuda:N"`
	DType  string `toml:"dtype" enum:"auto|float32|bfloat16" doc:"type of weights, activations and caches; auto = float32 on the CPU, bfloat16 on cuda and emu"`
	Gemm   string `toml:"gemm" enum:"own|openblas" doc:"matrix product of the CPU device"`
	// How a turn begins and ends; hs doctor shows what they come to.
	Stop     []string `toml:"stop" doc:"tokens that end a turn, as text or decimal id; empty = <|im_end|> and the eos_token_id of config.json and generation_config.json"`
	Thinking string   `toml:"thinking" enum:"auto|on|off" doc:"enable_thinking of the chat template; auto = the template's default"`
	// What training holds at once; hs doctor and hs init work out what fits.
	MicroRows int    `toml:"micro_rows" min:"0" max:"1048576" doc:"tokens of a training micro-batch, 0 = max_len or 2048, whichever is larger"`
	Recompute string `toml:"recompute" enum:"none|layers" doc:"layers = keep the inputs of layers only and run each forward again before its backward"`
}

// LoRAConfig asks for a low-rank adapter (model.LoRA) beside frozen weights.
type LoRAConfig struct {
	Rank    int      `toml:"rank" min:"0" max:"65536" doc:"rank of the adapter, 0 = none: all weights are trained"`
	Alpha   float64  `toml:"alpha" min:"0" doc:"the adapter's product counts alpha/rank times, 0 = twice the rank"`
	Targets []string `toml:"targets" doc:"linear layers with an adapter, by the last parts of their names (q_proj, mlp.up_proj, layers.3.mlp.up_proj); all-linear = every one"`
}

// TaskConfig selects environment, data and split sizes.
type TaskConfig struct {
	Env      string             `toml:"env" doc:"environment name"`
	PerStep  int                `toml:"per_step" min:"1" max:"65536" doc:"training tasks per step"`
	Data     string             `toml:"data" doc:"file of task rows; empty = generated tasks of the embedded world"`
	DSN      string             `toml:"dsn" doc:"database server for dbbench; empty = the embedded one"`
	Seed     uint64             `toml:"seed" max:"9007199254740991" doc:"seed of the task generator; equal across runs that are compared"`
	Train    int                `toml:"train" min:"1" doc:"number of train tasks"`
	Val      int                `toml:"val" min:"1" doc:"number of validation tasks"`
	Test     int                `toml:"test" min:"0" doc:"number of test tasks (sealed)"`
	Families map[string]float64 `toml:"families" doc:"weight of each task family in training, 0 = leave out; families not named get 1"`
}

// RolloutConfig bounds attempts. The budgets are equal under every harness
// (method.md R15).
type RolloutConfig struct {
	Group           int      `toml:"group" min:"2" max:"64" doc:"base attempts per task under the original harness"`
	Temperature     float64  `toml:"temperature" min:">0" max:"10" doc:"sampling temperature, part of every log-prob"`
	TopP            float64  `toml:"top_p" min:">0" max:"1" doc:"nucleus mass; below 1 needs allow_truncation"`
	TopK            int      `toml:"top_k" min:"0" doc:"keep the k most likely tokens, 0 = all; above 0 needs allow_truncation"`
	AllowTruncation bool     `toml:"allow_truncation" doc:"accept top_p or top_k in training although the trained density then differs from the sampled one"`
	MaxTurns        int      `toml:"max_turns" min:"1" max:"1000" doc:"turns per episode"`
	MaxNew          int      `toml:"max_new" min:"1" doc:"tokens per turn"`
	EpisodeDeadline Duration `toml:"episode_deadline" min:"1s" doc:"episode clock, without waiting for slots"`
	StepTimeout     Duration `toml:"step_timeout" min:"10ms" doc:"deadline of one tool call"`
	VerifierTimeout Duration `toml:"verifier_timeout" min:"10ms" doc:"deadline of grading"`
	StallAfter      Duration `toml:"stall_after" min:"1s" doc:"report who holds the step after this long without progress"`
	Slots           int      `toml:"slots" min:"1" max:"65536" doc:"sequences decoded together"`
	KVTokens        int      `toml:"kv_tokens" min:"0" doc:"tokens of paged key-value cache over all slots, 0 = slots x max_len"`
	Live            int      `toml:"live" min:"0" doc:"attempts open at once, 0 = twice the slots"`
	InfraWindow     int      `toml:"infra_window" min:"1" doc:"attempts looked at by the circuit breaker"`
	InfraShare      float64  `toml:"infra_share" min:">0" max:"1" doc:"the breaker pauses when more than this share of the window is infra"`
}

// RescueConfig selects the arm (method.md 4.1).
type RescueConfig struct {
	Mode          string `toml:"mode" enum:"off|retry|siblings" doc:"off = GRPO only, retry = original-harness rescue, siblings = Harness-S"`
	Attempts      int    `toml:"attempts" min:"2" max:"64" doc:"rescue attempts, each under its own auxiliary"`
	MinGroup      int    `toml:"min_group" min:"2" max:"64" doc:"valid attempts a group needs to be trained on"`
	Retries       int    `toml:"retries" min:"0" max:"10" doc:"re-runs of a void attempt"`
	Substitutions int    `toml:"substitutions" min:"0" max:"10" doc:"replacement harnesses per group after a harness fault"`
}

// RouterConfig selects the ranker and how its evidence is made (method.md 6).
type RouterConfig struct {
	Kind                string  `toml:"kind" enum:"rule|random" doc:"rule = validation-based ranking, random = keyed shuffle (control arm)"`
	Pool                string  `toml:"pool" doc:"directory of harness documents; empty = the starter pool of the environment"`
	A                   float64 `toml:"a" min:">0" doc:"prior strength of the smoothed rates, in attempts"`
	M                   int     `toml:"m" min:"1" doc:"nearest validation tasks looked at"`
	EvidenceTasks       int     `toml:"evidence_tasks" min:"0" doc:"validation tasks run under every harness before step 1; 0 = start without evidence"`
	EvidenceAttempts    int     `toml:"evidence_attempts" min:"1" max:"64" doc:"attempts per harness and validation task of the initial evidence"`
	TrainOutcomes       bool    `toml:"train_outcomes" doc:"also record outcomes of train tasks as evidence"`
	RecalibrateEvery    int     `toml:"recalibrate_every" min:"0" doc:"steps between recalibrations, 0 = off"`
	RecalibrateTasks    int     `toml:"recalibrate_tasks" min:"1" doc:"validation tasks per recalibration, rotating"`
	RecalibrateAttempts int     `toml:"recalibrate_attempts" min:"1" max:"64" doc:"attempts per harness and task of a recalibration"`
	Decay               float64 `toml:"decay" min:"0" max:"1" doc:"factor on old counts at a recalibration"`
}

// GRPOConfig is the objective (method.md 3.4-3.9).
type GRPOConfig struct {
	Loss          string     `toml:"loss" enum:"clip|gspo" doc:"policy loss"`
	Clip          [2]float64 `toml:"clip" min:">0" max:"10" doc:"clip range below and above ratio 1 (clip loss)"`
	GSPOClip      [2]float64 `toml:"gspo_clip" min:">0" max:"10" doc:"clip range of the sequence ratio (gspo loss)"`
	DualClip      float64    `toml:"dual_clip" min:"0" doc:"bound on the loss of negative advantages, above 1; 0 = off"`
	Normalize     string     `toml:"normalize" enum:"group_std|group_pop_std|none" doc:"divide advantages by the group's sample std, population std, or not at all"`
	Agg           string     `toml:"agg" enum:"token_mean|seq_mean|dr_grpo" doc:"how token losses are averaged; dr_grpo needs normalize = none"`
	LMax          int        `toml:"l_max" min:"1" doc:"constant length of dr_grpo, in tokens"`
	OldLogProbs   string     `toml:"old_logprobs" enum:"auto|trainer|sampler" doc:"auto = current values when one update is made, else recomputed once"`
	Updates       int        `toml:"updates" min:"1" max:"64" doc:"optimiser steps per collected batch"`
	KL            float64    `toml:"kl" min:"0" doc:"weight of the KL penalty to the initial weights, per nat"`
	Entropy       float64    `toml:"entropy" min:"0" max:"1" doc:"weight of the entropy bonus, per nat"`
	LossContext   string     `toml:"loss_context" enum:"own|stripped" doc:"context rescue tokens are trained in"`
	MaskTruncated bool       `toml:"mask_truncated" doc:"truncated attempts keep their reward but lose their tokens"`
	Mismatch      string     `toml:"mismatch" enum:"off|tis_token|mask_token|tis_seq|mask_seq|mask_geo" doc:"correction of sampler-trainer mismatch"`
	TISCap        float64    `toml:"tis_cap" min:">0" doc:"cap of tis_token and tis_seq"`
	MaskToken     [2]float64 `toml:"mask_token" min:">0" doc:"kept weights of mask_token"`
	MaskSeqCap    float64    `toml:"mask_seq_cap" min:">0" doc:"largest kept trajectory weight of mask_seq"`
	MaskGeo       [2]float64 `toml:"mask_geo" min:">0" doc:"kept geometric mean weights of mask_geo"`
	Veto          float64    `toml:"veto" min:"0" max:"1" doc:"drop a trajectory with any token weight below this, 0 = off"`
	GapWarn       float64    `toml:"gap_warn" min:">0" doc:"warn when the mean log-prob gap exceeds this, in nats"`
	GapStop       float64    `toml:"gap_stop" min:">0" doc:"stop when the mean log-prob gap exceeds this, in nats"`
	GapCorr       float64    `toml:"gap_corr" min:"-1" max:"1" doc:"stop when the correlation of the two log-prob vectors falls below this"`
	GapTrend      float64    `toml:"gap_trend" min:"1" doc:"stop when the mean gap of the last gap_window steps exceeds that of the first by this factor"`
	GapWindow     int        `toml:"gap_window" min:"1" doc:"steps averaged by the trend test"`
	GapFloor      float64    `toml:"gap_floor" min:"0" doc:"the trend test ignores window means below this, in nats (rounding noise of one numerics path)"`
}

// OptimConfig is AdamW with a global gradient clip.
type OptimConfig struct {
	LR          float64    `toml:"lr" min:"0" max:"1" doc:"peak learning rate; 0 = calibration run, weights stay"`
	Schedule    string     `toml:"schedule" enum:"constant|linear|cosine" doc:"shape after the warm-up; linear and cosine end at 0"`
	Warmup      int        `toml:"warmup" min:"0" doc:"steps of linear warm-up"`
	Betas       [2]float64 `toml:"betas" min:"0" max:"<1" doc:"decay of first and second moment"`
	WeightDecay float64    `toml:"weight_decay" min:"0" max:"10" doc:"decoupled weight decay"`
	Eps         float64    `toml:"eps" min:">0" max:"1" doc:"added to the root of the second moment"`
	Clip        float64    `toml:"clip" min:"0" doc:"global L2 norm gradients are scaled down to, 0 = off"`
	States      string     `toml:"states" enum:"fp32|bf16|8bit" doc:"storage of the two moments: 4, 2 or 1 bytes each per parameter; the narrow ones are rounded stochastically"`
	Master      string     `toml:"master" enum:"auto|fp32|hilo" doc:"storage of the weights: float32, or hilo = bfloat16, which is all that sampling and training compute with, and the 16 bits missing to float32; auto = fp32, hilo with model.dtype bfloat16, which needs it"`
}

// SaveConfig is the checkpoint schedule.
type SaveConfig struct {
	Every     int `toml:"every" min:"0" doc:"steps between checkpoints, 0 = only at the end"`
	Keep      int `toml:"keep" min:"1" doc:"newest checkpoints kept"`
	KeepEvery int `toml:"keep_every" min:"0" doc:"also keep every checkpoint whose step is a multiple, 0 = off"`
}

// EvalConfig is the scheduled evaluation.
type EvalConfig struct {
	Every       int     `toml:"every" min:"0" doc:"steps between evaluations, 0 = only before step 1 and at the end"`
	Split       string  `toml:"split" enum:"val|test" doc:"split; test is unsealed and recorded"`
	K           int     `toml:"k" min:"1" max:"64" doc:"k of Pass@k"`
	Tasks       int     `toml:"tasks" min:"0" doc:"tasks evaluated, 0 = the whole split"`
	Attempts    int     `toml:"attempts" min:"1" max:"64" doc:"attempts per task, at least k"`
	Temperature float64 `toml:"temperature" min:"0" max:"10" doc:"sampling temperature of evaluation"`
	Resamples   int     `toml:"resamples" min:"100" max:"1000000" doc:"bootstrap resamples of the intervals"`
}

// SFTConfig is the warm start. Original and Matched choose the harness a
// demonstration is shown under; the three good_ probabilities then choose, given
// that harness, whether the demonstration is the careful one or the careless one.
type SFTConfig struct {
	Steps         int     `toml:"steps" min:"1" doc:"optimiser steps"`
	Batch         int     `toml:"batch" min:"1" doc:"demonstrations per step"`
	LR            float64 `toml:"lr" min:">0" max:"1" doc:"peak learning rate, cosine to 0"`
	Warmup        int     `toml:"warmup" min:"0" doc:"steps of linear warm-up"`
	Tasks         int     `toml:"tasks" min:"1" doc:"number of train tasks demonstrated"`
	Seed          uint64  `toml:"seed" max:"9007199254740991" doc:"seed of task choice and mix"`
	GoodOriginal  float64 `toml:"good_original" min:"0" max:"1" doc:"probability that a demonstration under the original harness is the careful one"`
	GoodMatched   float64 `toml:"good_matched" min:"0" max:"1" doc:"the same under an auxiliary that addresses the task's cause"`
	GoodUnmatched float64 `toml:"good_unmatched" min:"0" max:"1" doc:"the same under any other auxiliary"`
	Original      float64 `toml:"original" min:"0" max:"1" doc:"share of demonstrations under the original harness, the rest under auxiliaries"`
	Matched       float64 `toml:"matched" min:"0" max:"1" doc:"share of auxiliary demonstrations whose auxiliary addresses the task's cause"`
	Recover       float64 `toml:"recover" min:"0" max:"1" doc:"share of demonstrations that first make an error and recover from it"`
}

// Defaults returns the starting values of method.md 8; each key's documentation
// is in the struct tags above.
func Defaults() Config {
	return Config{
		Run:   RunConfig{Name: "run", Seed: 1, Steps: 100, PauseLimit: Duration(time.Hour)},
		Model: ModelConfig{MaxLen: 32768, Device: "auto", DType: "auto", Gemm: "own", Thinking: "auto", Recompute: "none"},
		LoRA:  LoRAConfig{Targets: []string{model.AllLinear}},
		Task:  TaskConfig{Env: "dbbench", PerStep: 16, Seed: 1, Train: 2000, Val: 100, Test: 100},
		Rollout: RolloutConfig{
			Group: 8, Temperature: 1, TopP: 1, MaxTurns: 20, MaxNew: 2048,
			EpisodeDeadline: Duration(850 * time.Second), StepTimeout: Duration(60 * time.Second),
			VerifierTimeout: Duration(300 * time.Second), StallAfter: Duration(5 * time.Minute),
			Slots: 64, InfraWindow: 64, InfraShare: 0.5,
		},
		Rescue: RescueConfig{Mode: "siblings", Attempts: 8, MinGroup: 6, Retries: 2, Substitutions: 2},
		Router: RouterConfig{
			Kind: "rule", A: 4, M: 16, EvidenceTasks: 16, EvidenceAttempts: 2,
			RecalibrateTasks: 16, RecalibrateAttempts: 1, Decay: 0.5,
		},
		GRPO: GRPOConfig{
			Loss: "clip", Clip: [2]float64{0.2, 0.28}, GSPOClip: [2]float64{3e-4, 4e-4}, DualClip: 3,
			Normalize: "group_std", Agg: "token_mean", LMax: 32768, OldLogProbs: "auto", Updates: 1,
			LossContext: "own", Mismatch: "off", TISCap: 2, MaskToken: [2]float64{0.5, 5},
			MaskSeqCap: 3, MaskGeo: [2]float64{0.99, 1.01},
			GapWarn: 0.02, GapStop: 0.05, GapCorr: 0.98, GapTrend: 2, GapWindow: 20, GapFloor: 1e-4,
		},
		Optim: OptimConfig{LR: 1e-6, Schedule: "constant", Betas: [2]float64{0.9, 0.98}, WeightDecay: 0.1, Eps: 1e-8, Clip: 1, States: "fp32", Master: "auto"},
		Save:  SaveConfig{Every: 5, Keep: 2},
		Eval:  EvalConfig{Every: 20, Split: "val", K: 3, Tasks: 100, Attempts: 3, Temperature: 1, Resamples: 10000},
		SFT: SFTConfig{
			Steps: 400, Batch: 32, LR: 1e-3, Warmup: 20, Tasks: 4000, Seed: 1,
			GoodOriginal: 0.2, GoodMatched: 0.9, GoodUnmatched: 0.2, Original: 0.4, Matched: 0.5, Recover: 0.1,
		},
	}
}

// Duration is a time span written as text with a unit, such as "850s" or "1h30m".
type Duration time.Duration

// MarshalText renders the span in Go's notation.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// String renders the span, "5m" rather than "5m0s".
func (d Duration) String() string { return shortDuration(time.Duration(d)) }

// UnmarshalText parses Go's notation; a number without unit is refused.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil {
		return &Error{Op: "parse duration", Err: err, Hint: `write a number with a unit, such as "90s", "5m" or "1h30m"`}
	}
	*d = Duration(v)
	return nil
}

// D is the span as the standard library's type.
func (d Duration) D() time.Duration { return time.Duration(d) }

package harness

// Pred is a predicate over facts (envs.md 5.2).
type Pred struct {
	All   []Pred `toml:"all" json:"all,omitempty"`
	Any   []Pred `toml:"any" json:"any,omitempty"`
	Not   *Pred  `toml:"not" json:"not,omitempty"`
	F     string `toml:"f" json:"f,omitempty"`
	Op    string `toml:"op" json:"op,omitempty"`
	V     any    `toml:"v" json:"v,omitempty"`
	Scope string `toml:"scope" json:"scope,omitempty"`
}

type ruleSet struct{}

func compile(ops []Op) (*ruleSet, error) { return &ruleSet{}, nil }

func checkDoc(d Doc) []error { return nil }

// Validate checks a spec against the protocol of its original.
func Validate(s, original *Spec) error { return nil }

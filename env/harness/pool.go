package harness

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

//go:embed pool/*/*.toml
var starter embed.FS

// Pool is the frozen, ordered set of harnesses: the original first, then the
// auxiliaries in file order. Do not modify Specs.
type Pool struct {
	Specs  []*Spec
	digest string
	byID   map[string]*Spec
}

// Digest is the SHA-256 over the canonical documents in id order. A run
// records it and refuses to continue under another.
func (p *Pool) Digest() string { return p.digest }

// Original is the harness the product is evaluated with.
func (p *Pool) Original() *Spec { return p.Specs[0] }

// Auxiliaries are the siblings in pool order.
func (p *Pool) Auxiliaries() []*Spec { return slices.Clone(p.Specs[1:]) }

// Get finds a spec by id or by name; nil when there is none.
func (p *Pool) Get(idOrName string) *Spec {
	if s := p.byID[idOrName]; s != nil {
		return s
	}
	for _, s := range p.Specs {
		if s.Name == idOrName {
			return s
		}
	}
	return nil
}

// NewPool freezes specs, the original first. Every problem is reported.
func NewPool(specs []*Spec) (*Pool, error) {
	if len(specs) == 0 {
		return nil, errors.New("build pool: no harnesses")
	}
	p := &Pool{Specs: slices.Clone(specs), byID: map[string]*Spec{}}
	var errs []error
	behave := map[string]string{}
	names := map[string]bool{}
	for i, s := range specs {
		if s.Original() != (i == 0) {
			errs = append(errs, fmt.Errorf("build pool: %q at position %d; exactly the first harness has no parent", s.Name, i))
		}
		if names[s.Name] {
			errs = append(errs, fmt.Errorf("build pool: name %q twice", s.Name))
		}
		names[s.Name] = true
		if prev := behave[s.behave]; prev != "" {
			errs = append(errs, fmt.Errorf("build pool: %q and %q behave the same", prev, s.Name))
		}
		behave[s.behave] = s.Name
		p.byID[s.id] = s
		if err := Validate(s, specs[0]); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	ordered := slices.Clone(specs)
	slices.SortFunc(ordered, func(a, b *Spec) int { return strings.Compare(a.id, b.id) })
	h := sha256.New()
	for _, s := range ordered {
		h.Write(s.canon)
	}
	p.digest = hex.EncodeToString(h.Sum(nil))
	return p, nil
}

// LoadPool reads every *.toml of dir in name order; the first is the original.
// A sibling's parent is the name of a harness read before it; its edits are
// applied on top of the parent's.
func LoadPool(fsys fs.FS, dir string) (*Pool, error) {
	names, err := fs.Glob(fsys, path.Join(dir, "*.toml"))
	if err != nil {
		return nil, fmt.Errorf("list pool %s: %w", dir, err)
	}
	if len(names) == 0 {
		return nil, &Error{Op: "load pool " + dir, Err: errors.New("no *.toml files"), Hint: "a pool directory holds the original as its first file, e.g. 00_original.toml"}
	}
	slices.Sort(names)
	var specs []*Spec
	docs := map[string]Doc{}
	var errs []error
	for _, name := range names {
		raw, err := fs.ReadFile(fsys, name)
		if err != nil {
			return nil, fmt.Errorf("read pool file %s: %w", name, err)
		}
		d, err := ParseDoc(raw)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}
		var original *Spec
		if len(specs) > 0 {
			original = specs[0]
		}
		if original != nil && d.Parent != "" && d.Parent != original.Name {
			parent, ok := docs[d.Parent]
			if !ok {
				errs = append(errs, fmt.Errorf("%s: parent %q is not in the pool before it", name, d.Parent))
				continue
			}
			d.Edits = append(slices.Clone(parent.Edits), d.Edits...)
		}
		s, err := Resolve(d, original)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			if original == nil {
				break
			}
			continue
		}
		docs[d.Name] = d
		specs = append(specs, s)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return NewPool(specs)
}

// StarterPool is the embedded pool of an environment: the original and 19
// auxiliaries.
func StarterPool(envName string) (*Pool, error) {
	if _, err := fs.Stat(starter, "pool/"+envName); err != nil {
		return nil, &Error{Op: "load starter pool", Err: fmt.Errorf("no pool for environment %q", envName), Hint: "starter pools exist for: " + strings.Join(starterNames(), ", ")}
	}
	return LoadPool(starter, "pool/"+envName)
}

func starterNames() []string {
	entries, err := fs.ReadDir(starter, "pool")
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

package trainer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"harness-s/env"
)

// RunDir is the directory of one run (design.md 12). One process holds its lock
// while it writes; readers need no lock, because everything is published by
// rename or appended line by line.
type RunDir struct {
	dir     string
	lock    string
	Attempt int // number of the process attempt, from 1: logs/attempt_N.log

	mu       sync.Mutex
	manifest Manifest
}

// Manifest says what the run was made of. Seeds, digests and unsealings are
// enough to tell whether two runs can be compared.
type Manifest struct {
	Schema    int                `json:"schema"`
	Name      string             `json:"name"`
	Created   time.Time          `json:"created"`
	Version   string             `json:"version"`
	Commit    string             `json:"commit,omitempty"`
	Go        string             `json:"go,omitempty"`
	ABI       int                `json:"abi,omitempty"`
	Device    string             `json:"device,omitempty"`
	Driver    string             `json:"driver,omitempty"`
	Seed      uint64             `json:"seed"`
	Config    string             `json:"config_digest"`
	Data      string             `json:"data_digest,omitempty"`
	Env       *env.Info          `json:"env,omitempty"`
	Pool      string             `json:"pool_digest,omitempty"`
	Model     string             `json:"model_digest,omitempty"`
	Attempts  []AttemptInfo      `json:"attempts,omitempty"`
	Unsealed  []env.UnsealRecord `json:"unsealed,omitempty"`
	Extra     map[string]string  `json:"extra,omitempty"`
	Completed bool               `json:"completed,omitempty"`
}

// AttemptInfo is one process that worked on the run.
type AttemptInfo struct {
	Number int       `json:"number"`
	PID    int       `json:"pid"`
	Host   string    `json:"host"`
	Start  time.Time `json:"start"`
	Resume int       `json:"resume_step"`
}

const manifestFile, lockFile = "manifest.json", "hs.lock"

// subdirs of a run, made at creation.
var subdirs = [...]string{"logs", "rollouts", "router", "evidence", "pool", "evals", "tb", "checkpoints"}

// CreateRun makes root/name with its folders, writes run.toml and the manifest,
// and takes the lock. A directory that is in use already is refused with
// ErrRunExists and the three ways out; clean removes it first, unless a live
// process holds its lock or it does not look like a run.
func CreateRun(root, name string, config []byte, m Manifest, clean bool) (_ *RunDir, err error) {
	if name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
		return nil, hinted("create run", "use letters, digits, - and _", "%q is not a directory name", name)
	}
	dir := filepath.Join(root, name)
	if used, err := inUse(dir); err != nil {
		return nil, diskError("create run", dir, 0, err)
	} else if used && clean {
		if err := cleanRun(dir); err != nil {
			return nil, err
		}
	} else if used {
		return nil, &Error{Op: "create run", Err: fmt.Errorf("%s: %w", dir, ErrRunExists),
			Hint: fmt.Sprintf("go on with it: --run %s --resume; keep it and start another: --run NAME; delete it and start again: --run %s --clean", name, name)}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, diskError("create run", dir, 0, err)
	}
	r := &RunDir{dir: dir, Attempt: 1, manifest: m}
	r.manifest.Schema, r.manifest.Name = 1, name
	if err := r.takeLock(m.Created); err != nil {
		os.Remove(dir) // which succeeds when it is empty
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Discard())
		}
	}()
	for _, s := range subdirs {
		if err := os.MkdirAll(r.Path(s), 0o755); err != nil {
			return nil, diskError("create run", r.Path(s), 0, err)
		}
	}
	// run.toml is the last: a kill before it leaves a directory that counts as unused, a kill after it a run that goes on.
	if err := r.startAttempt(m.Created, 0); err != nil {
		return nil, err
	}
	if err := WriteAtomic(r.Path("run.toml"), config); err != nil {
		return nil, err
	}
	return r, nil
}

// OpenRun takes the lock of an existing run in order to go on with it. The caller
// picks the step and then calls BeginResume.
func OpenRun(root, name string, now time.Time) (*RunDir, error) {
	r := &RunDir{dir: filepath.Join(root, name)}
	m, err := ReadManifest(r.dir)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil, &Error{Op: "open run", Err: err, Hint: "list runs with: hs ls"}
		}
		return nil, &Error{Op: "open run", Err: err, Hint: "put back " + manifestFile + " from a copy; checkpoints/*/model can be used without it, as model.path"}
	}
	r.manifest, r.Attempt = m, len(m.Attempts)+1
	for _, s := range subdirs { // someone may have tidied up empty folders
		if err := os.MkdirAll(r.Path(s), 0o755); err != nil {
			return nil, diskError("open run", r.Path(s), 0, err)
		}
	}
	if err := r.takeLock(now); err != nil {
		return nil, err
	}
	return r, nil
}

// BeginResume records a new attempt that goes on after step, 0 = from the start, and drops every record past it: checkpoints, metrics,
// events, decisions, rollouts, evaluations and evidence versions. Checkpoints go first: one that is left has the records of its step, also
// after a kill in between. Damaged lines are set aside and told to warn (nil = ignored).
func (r *RunDir) BeginResume(step int, now time.Time, warn func(error)) error {
	if err := NewCheckpoints(r.Path("checkpoints"), 1, 0, nil).DropAfter(step); err != nil {
		return fmt.Errorf("resume run: %w", err)
	}
	keep := step
	if step == 0 { // what precedes step 1 is made again too
		keep = -1
	}
	for _, name := range []string{"metrics.jsonl", "events.jsonl", "router/decisions.jsonl"} {
		damaged, err := truncateJSONL(r.Path(name), keep)
		if err != nil {
			return fmt.Errorf("resume run: %w", err)
		}
		if damaged > 0 && warn != nil {
			warn(fmt.Errorf("%s: %d damaged lines dropped; the file as it was: %s", name, damaged, r.Path(name+damagedMark)))
		}
	}
	for _, sub := range []string{"rollouts", "evals"} {
		entries, err := os.ReadDir(r.Path(sub))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("resume run: %w", err)
		}
		for _, e := range entries {
			if n, ok := stepOf(e.Name()); ok && n > keep {
				if err := os.Remove(r.Path(sub, e.Name())); err != nil {
					return fmt.Errorf("resume run: %w", err)
				}
			}
		}
	}
	if err := r.dropEvidence(keep); err != nil {
		return fmt.Errorf("resume run: %w", err)
	}
	return r.startAttempt(now, step)
}

// dropEvidence removes evidence versions that were built after step.
func (r *RunDir) dropEvidence(step int) error {
	names, err := filepath.Glob(r.Path("evidence", "*.json"))
	if err != nil {
		return err
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		var at struct {
			Step int `json:"step"`
		}
		if err := json.Unmarshal(b, &at); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if at.Step > step {
			if err := os.Remove(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// stepOf reads the number of step_000120.jsonl.zst and the like.
func stepOf(name string) (int, bool) {
	rest, ok := strings.CutPrefix(name, "step_")
	if !ok {
		return 0, false
	}
	num, _, _ := strings.Cut(rest, ".")
	n, err := strconv.Atoi(num)
	return n, err == nil
}

func (r *RunDir) startAttempt(now time.Time, step int) error {
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("read host name: %w", err)
	}
	return r.UpdateManifest(func(m *Manifest) {
		m.Completed = false
		m.Attempts = append(m.Attempts, AttemptInfo{Number: r.Attempt, PID: os.Getpid(), Host: host, Start: now, Resume: step})
	})
}

// Dir is the run's directory; Name its last element.
func (r *RunDir) Dir() string  { return r.dir }
func (r *RunDir) Name() string { return filepath.Base(r.dir) }

// Path joins elements below the run directory.
func (r *RunDir) Path(elem ...string) string {
	return filepath.Join(append([]string{r.dir}, elem...)...)
}

// Manifest returns a copy of the manifest.
func (r *RunDir) Manifest() Manifest {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.manifest
}

// UpdateManifest changes the manifest and publishes it; when the write fails the
// manifest in memory stays as it was.
func (r *RunDir) UpdateManifest(change func(*Manifest)) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.manifest
	change(&m)
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	if err := WriteAtomic(r.Path(manifestFile), append(b, '\n')); err != nil {
		return err
	}
	r.manifest = m
	return nil
}

// RecordUnseal implements env.Recorder: the record is on disk before any test
// task can be read.
func (r *RunDir) RecordUnseal(u env.UnsealRecord) error {
	return r.UpdateManifest(func(m *Manifest) { m.Unsealed = append(m.Unsealed[:len(m.Unsealed):len(m.Unsealed)], u) })
}

// ReadManifest reads the manifest of any run directory, without a lock.
func ReadManifest(dir string) (Manifest, error) {
	var m Manifest
	b, err := os.ReadFile(filepath.Join(dir, manifestFile))
	if err != nil {
		return m, fmt.Errorf("read manifest: %w", err)
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("read manifest of %s: %w", dir, err)
	}
	return m, nil
}

// Preflight refuses to start when the file system cannot hold the checkpoints that are still to come: those that are kept and the next,
// which is complete before the oldest goes (pitfalls.md row 74).
func (r *RunDir) Preflight(checkpointBytes int64, s SaveConfig) error {
	have, err := r.Checkpoints(s, nil).List()
	if err != nil {
		return err
	}
	free, err := FreeBytes(r.dir)
	if err != nil {
		return err
	}
	n := max(s.Keep+1-len(have), 1)
	if need := int64(n) * checkpointBytes; free < need {
		return &Error{Op: "check free space", Err: fmt.Errorf("%s: %w for %d checkpoints (%s needed, %s free)", r.dir, ErrNoSpace, n, sizeText(need), sizeText(free)),
			Hint: "free space, choose another runs root with -C DIR, or lower save.keep"}
	}
	return nil
}

// LogFile creates logs/attempt_N.log and points logs/latest at it.
func (r *RunDir) LogFile() (*os.File, error) {
	name := fmt.Sprintf("attempt_%d.log", r.Attempt)
	f, err := os.OpenFile(r.Path("logs", name), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, diskError("open log", r.Path("logs", name), 0, err)
	}
	tmp := r.Path("logs", "latest.tmp")
	err = errors.Join(ignoreMissing(os.Remove(tmp)), os.Symlink(name, tmp), os.Rename(tmp, r.Path("logs", "latest")))
	if err != nil {
		return nil, errors.Join(diskError("link latest log", r.Path("logs", "latest"), 0, err), f.Close())
	}
	return f, nil
}

// WriteRollouts publishes rollouts/step_N.jsonl.zst with one line per record.
func (r *RunDir) WriteRollouts(step int, records []any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	for i, rec := range records {
		if err := e.Encode(rec); err != nil {
			return fmt.Errorf("encode rollout %d of step %d: %w", i, step, err)
		}
	}
	packed, err := compress(text.Bytes())
	if err != nil {
		return err
	}
	return WriteAtomic(r.Path("rollouts", stepName(step)+".jsonl.zst"), packed)
}

// ReadRollouts calls each with every line of a step's rollouts file.
func ReadRollouts(dir string, step int, each func(line []byte) error) error {
	packed, err := os.ReadFile(filepath.Join(dir, "rollouts", stepName(step)+".jsonl.zst"))
	if err != nil {
		return fmt.Errorf("read rollouts of step %d: %w", step, err)
	}
	text, err := decompress(packed)
	if err != nil {
		return fmt.Errorf("read rollouts of step %d: %w", step, err)
	}
	for line := range bytes.Lines(text) {
		if err := each(bytes.TrimRight(line, "\n")); err != nil {
			return err
		}
	}
	return nil
}

// WriteJSON publishes a JSON file below the run directory.
func (r *RunDir) WriteJSON(name string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	return WriteAtomic(r.Path(name), append(b, '\n'))
}

// Checkpoints opens the run's checkpoint folder.
func (r *RunDir) Checkpoints(s SaveConfig, warn func(error)) *Checkpoints {
	return NewCheckpoints(r.Path("checkpoints"), s.Keep, s.KeepEvery, warn)
}

// Owned fails when the directory was removed, or made anew by another process, while this one holds it: nothing more may be written there.
func (r *RunDir) Owned() error {
	o, err := readLock(r.Path(lockFile))
	if err == nil && o.PID == os.Getpid() {
		return nil
	}
	if err == nil {
		err = fmt.Errorf("it belongs to process %d on %s now", o.PID, o.Host)
	}
	return &Error{Op: "write run", Err: fmt.Errorf("%s was removed or replaced while the run was using it: %w", r.dir, err), Hint: "start the run again"}
}

// Close releases the lock.
func (r *RunDir) Close() error {
	if r.lock == "" {
		return nil
	}
	if err := r.Owned(); err != nil {
		r.lock = ""
		return err
	}
	err := os.Remove(r.lock)
	r.lock = ""
	if err != nil {
		return fmt.Errorf("release lock: %w", err)
	}
	return nil
}

// Discard releases the lock and removes the directory: for a new run that could not start.
func (r *RunDir) Discard() error {
	if err := os.RemoveAll(r.dir); err != nil {
		return fmt.Errorf("discard run: %w", err)
	}
	r.lock = ""
	return nil
}

// Appender adds JSON lines to a file; every line is one write, so a kill leaves
// whole lines and at most one cut one, which resume removes.
type Appender struct {
	mu   sync.Mutex
	f    *appended
	path string
}

// Appender opens name below the run directory for appending.
func (r *RunDir) Appender(name string) (*Appender, error) {
	path := r.Path(name)
	f, err := openAppended(path, 0)
	if err != nil {
		return nil, diskError("open "+name, path, 0, err)
	}
	return &Appender{f: f, path: path}, nil
}

// Write appends v as one line, or nothing: the caller may try again.
func (a *Appender) Write(v any) error {
	var line bytes.Buffer
	e := json.NewEncoder(&line)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("encode line of %s: %w", filepath.Base(a.path), err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.f.append(line.Bytes()); err != nil {
		return diskError("append to "+filepath.Base(a.path), a.path, int64(line.Len()), err)
	}
	return nil
}

// Sync flushes to the disk.
func (a *Appender) Sync() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.f.Sync(); err != nil {
		return diskError("sync "+filepath.Base(a.path), a.path, 0, err)
	}
	return nil
}

// Close syncs and closes the file.
func (a *Appender) Close() error { return errors.Join(a.Sync(), a.f.Close()) }

// damagedMark is added to the name of a file that had damaged lines.
const damagedMark = ".damaged"

// truncateJSONL keeps the lines whose "step" is at most step. A last line that a kill cut short is dropped. Damaged lines before it, which a
// crash of the machine may leave, are dropped and counted; the file as it was is kept beside it.
func truncateJSONL(path string, step int) (damaged int, err error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var keep []byte
	for line := range bytes.Lines(text) {
		if line[len(line)-1] != '\n' {
			break // unfinished
		}
		var at struct {
			Step *int `json:"step"`
		}
		if err := json.Unmarshal(line, &at); err != nil || at.Step == nil {
			damaged++
		} else if *at.Step <= step {
			keep = append(keep, line...)
		}
	}
	if len(keep) == len(text) {
		return 0, nil
	}
	if damaged > 0 {
		if err := WriteAtomic(path+damagedMark, text); err != nil {
			return damaged, err
		}
	}
	return damaged, WriteAtomic(path, keep)
}

// inUse reports whether dir holds more than a process that was killed while it created the run leaves: lock, temporary files, empty
// folders, a manifest without run.toml. Whether the lock's owner lives is takeLock's question.
func inUse(dir string) (bool, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	for _, e := range entries {
		name := e.Name()
		switch {
		case strings.HasPrefix(name, lockFile), strings.HasSuffix(name, ".tmp"), name == manifestFile:
		case slices.Contains(subdirs[:], name):
			if in, err := os.ReadDir(filepath.Join(dir, name)); err != nil || len(in) > 0 {
				return true, err
			}
		default:
			return true, err
		}
	}
	return false, err
}

// cleanRun removes a run directory, and nothing that is not one.
func cleanRun(dir string) error {
	if _, err := ReadManifest(dir); err != nil {
		if _, e := os.Stat(filepath.Join(dir, "run.toml")); e != nil {
			return hinted("clean run", "remove it yourself if it may go", "%s holds neither %s nor run.toml", dir, manifestFile)
		}
	}
	if o, err := readLock(filepath.Join(dir, lockFile)); err == nil && o.alive() {
		return lockedError(dir, o)
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("clean run: %w", err)
	}
	return nil
}

// lockOwner is the content of hs.lock. Began tells a process from a later one of the same number, which containers reuse at once.
type lockOwner struct {
	PID   int       `json:"pid"`
	Began uint64    `json:"began,omitempty"` // start of the process in clock ticks since boot; 0 = unknown
	Host  string    `json:"host"`
	Start time.Time `json:"start"`
}

func readLock(path string) (lockOwner, error) {
	var o lockOwner
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &o)
	}
	return o, err
}

// alive reports whether the owner may still run. A process of another host is
// taken to be alive: only its host can tell.
func (o lockOwner) alive() bool {
	host, err := os.Hostname()
	if err != nil || host != o.Host {
		return true
	}
	began, running, err := processStart(o.PID)
	if errors.Is(err, os.ErrNotExist) { // ended, or /proc hides it
		err = unix.Kill(o.PID, 0)
		return err == nil || errors.Is(err, unix.EPERM)
	}
	return err != nil || running && (o.Began == 0 || began == o.Began)
}

// processStart reads when a process started, in clock ticks since boot, and whether it still runs rather than waits to be reaped.
func processStart(pid int) (ticks uint64, running bool, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false, err
	}
	// The second field is the name in parentheses, which may hold anything; state is field 3, the start field 22 (proc_pid_stat(5)).
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return 0, false, fmt.Errorf("read start of process %d: %q", pid, b)
	}
	ticks, err = strconv.ParseUint(f[19], 10, 64)
	return ticks, f[0] != "Z" && f[0] != "X", err
}

func lockedError(dir string, o lockOwner) error {
	return &Error{Op: "lock run", Err: fmt.Errorf("%s: %w: process %d on %s since %s", dir, ErrLocked, o.PID, o.Host, o.Start.Format(time.RFC3339)),
		Hint: fmt.Sprintf("wait for it or stop it with: kill -INT %d; if that host is gone: rm %s", o.PID, filepath.Join(dir, lockFile))}
}

// takeLock creates the lock file; one whose process is dead is replaced. Creation
// is by link of a finished file, so two processes cannot both win.
func (r *RunDir) takeLock(now time.Time) error {
	path := r.Path(lockFile)
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("read host name: %w", err)
	}
	began, _, err := processStart(os.Getpid())
	if err != nil {
		began = 0 // no /proc here
	}
	b, err := json.Marshal(lockOwner{PID: os.Getpid(), Began: began, Host: host, Start: now})
	if err != nil {
		return fmt.Errorf("encode lock: %w", err)
	}
	mine := fmt.Sprintf("%s.%d", path, os.Getpid())
	defer os.Remove(mine)
	if err := os.WriteFile(mine, append(b, '\n'), 0o644); err != nil {
		return diskError("lock run", path, int64(len(b)), err)
	}
	for range 2 {
		if err = os.Link(mine, path); err == nil {
			r.lock = path
			return nil
		}
		if !errors.Is(err, os.ErrExist) {
			return diskError("lock run", path, 0, err)
		}
		o, rerr := readLock(path)
		if rerr == nil && o.alive() {
			return lockedError(r.dir, o)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove stale lock: %w", err)
		}
	}
	return fmt.Errorf("lock run: %w", err)
}

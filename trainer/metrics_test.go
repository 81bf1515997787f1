package trainer

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// exampleRecord has the numbers of the step line in design.md 13.
func exampleRecord() *Record {
	r := NewRecord(120, 600)
	r.Reward.Mean, r.Group.Live, r.Group.Total, r.Group.AllPass, r.Group.AllFail = 0.41, 11, 16, 3, 4
	r.Rescue.Groups, r.Group.Rescued, r.Adv.NonZero, r.Adv.Total, r.Tokens.Trained = 4, 2, 176, 256, 41200
	r.Grad.Norm, r.Gap.Max, r.Entropy.Mean, r.KL.Old, r.Optim.LR = 0.42, 3e-4, 0.83, 1.2e-4, 1e-6
	r.Time.Total, r.Time.Gen, r.Time.Env, r.Time.Rescue, r.Time.Update = 84.2, 61, 9.4, 7, 12
	r.Perf.Decode, r.Perf.MFU, r.Mem.Peak = 5100, 0.31, 118<<30
	return r
}

func TestStepLine(t *testing.T) {
	want := "step 120/600  reward .41  live 11/16  pass 3  fail 2  resc 4→2  adv≠0 176/256  tok 41.2k  |g| .42  gap 3e-4  ent .83  kl 1.2e-4  lr 1e-6  84.2s gen61 env9.4 resc7.0 upd12  5.1k tok/s  mfu 31%  118GiB"
	if got := exampleRecord().Line(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := NewRecord(3, 25).Line(); got != "step  3/25" {
		t.Errorf("empty record: %q", got)
	}
	r := NewRecord(1, 9)
	r.Group.Incomplete, r.Gap.Max, r.Mem.Peak, r.Tokens.Trained, r.Grad.Norm = 1, 0, 300<<20, 2.5e6, -0.5
	if got := r.Line(); got != "step 1/9  void 1  tok 2.5M  |g| -.50  gap 0  300MiB" {
		t.Errorf("%q", got)
	}
}

func TestRecordJSON(t *testing.T) {
	r := exampleRecord()
	r.Harness = map[string]HarnessCount{"b": {3, 1, 0}, "a": {2, 0, 1}}
	r.Masked = map[string]int{"mask_geo": 7}
	r.Gap.Max = math.Inf(1)
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	step, vs, err := ParseRecord(b)
	if err != nil {
		t.Fatal(err)
	}
	if step != 120 || vs["reward/mean"] != 0.41 || vs["harness/a/fault"] != 1 || vs["mask/mask_geo/tokens"] != 7 || !math.IsInf(vs["gap/max"], 1) {
		t.Errorf("%v", vs)
	}
	if _, ok := vs["loss/pg"]; ok {
		t.Error("an absent metric was written")
	}
	if len(vs) != len(r.Values()) {
		t.Errorf("%d values back of %d", len(vs), len(r.Values()))
	}
	again, err := json.Marshal(r)
	if err != nil || !bytes.Equal(b, again) {
		t.Error("encoding is not repeatable")
	}
	for _, bad := range []string{"{", `{"schema":2,"step":1}`, `{}`} {
		if _, _, err := ParseRecord([]byte(bad)); err == nil {
			t.Errorf("%s accepted", bad)
		}
	}
}

func TestMetricRegistry(t *testing.T) {
	seen := map[string]bool{}
	for _, d := range Metrics() {
		if d.Doc == "" || strings.Count(d.Name, "/") == 0 || seen[d.Name] {
			t.Errorf("%+v", d)
		}
		seen[d.Name] = true
	}
	// The headline names of design.md 13.
	for _, name := range strings.Fields(`reward/mean pass/at1 pass/at8 group/mixed group/allpass group/allfail group/rescued group/rescue_live group/dropped
		rescue/success rescue/extra_rollouts_pct router/top1_success router/agreement router/evidence_age outcome/infra outcome/timeout outcome/harness_fault
		tokens/prompt tokens/policy tokens/tool tokens/harness tokens/trained turns/mean trunc/pct loss/pg grad/norm clip/low clip/high entropy/mean kl/old
		gap/mean gap/max time/gen time/env time/rescue time/update time/ckpt queue/attempt queue/rescue perf/tok_s_decode perf/tok_s_train perf/mfu mem/peak mem/kv`) {
		if !seen[name] {
			t.Errorf("no metric %s", name)
		}
	}
	if !MachineDependent("time/gen") || MachineDependent("reward/mean") {
		t.Error("machine dependence")
	}
}

func TestSinks(t *testing.T) {
	root := t.TempDir()
	r := create(t, root, "a")
	defer closeRun(t, r)
	a, err := r.Appender("metrics.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	tb, err := TBSink(r.Path("tb"), "host", func() time.Time { return at(0) })
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []Sink{JSONLSink(a), ConsoleSink(&out), tb} {
		for range 2 {
			if err := s.Write(exampleRecord()); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if strings.Count(out.String(), "\n") != 2 {
		t.Errorf("console %q", out.String())
	}
	b, err := os.ReadFile(r.Path("metrics.jsonl"))
	if err != nil || bytes.Count(b, []byte("\n")) != 2 {
		t.Errorf("jsonl %q %v", b, err)
	}
	names, err := filepath.Glob(r.Path("tb", "events.out.tfevents.0001000000.host"))
	if err != nil || len(names) != 1 {
		t.Fatalf("%v %v", names, err)
	}
	if b, err = os.ReadFile(names[0]); err != nil {
		t.Fatal(err)
	}
	records := 0
	for ; len(b) > 0; records++ { // the framing a TFRecord reader checks
		n := binary.LittleEndian.Uint64(b)
		if binary.LittleEndian.Uint32(b[8:]) != maskedCRC(b[:8]) || binary.LittleEndian.Uint32(b[12+n:]) != maskedCRC(b[12:12+n]) {
			t.Fatalf("record %d has a wrong checksum", records)
		}
		b = b[16+n:]
	}
	if records != 4 { // version, session start, two steps
		t.Errorf("%d records, want 4", records)
	}
	again, err := TBSink(r.Path("tb"), "host", func() time.Time { return at(0) })
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
	if names, err = filepath.Glob(r.Path("tb", "*")); err != nil || len(names) != 2 {
		t.Errorf("a second file within the second: %v %v", names, err)
	}
}

// The bytes were worked out by hand from the protobuf wire format; the frame's
// checksums are recomputed here from their definition.
func TestEventBytes(t *testing.T) {
	got := event(1.5, 300, "", []Value{{"a/b", 2}})
	want := "09000000000000f83f" + // field 1, fixed64: 1.5
		"10ac02" + // field 2, varint: 300
		"2a0c" + "0a0a" + "0a03612f62" + "1500000040" // summary{value{tag "a/b", simple_value 2}}
	if hex.EncodeToString(got) != want {
		t.Errorf("got  %x\nwant %s", got, want)
	}
	if v := hex.EncodeToString(event(0, 0, "brain.Event:2", nil)); v != "0900000000000000001a0d"+hex.EncodeToString([]byte("brain.Event:2")) {
		t.Errorf("version event %s", v)
	}
	rec := tfRecord([]byte("abc"))
	if len(rec) != 19 || hex.EncodeToString(rec[:8]) != "0300000000000000" || string(rec[12:15]) != "abc" {
		t.Errorf("frame %x", rec)
	}
	// CRC-32C of "123456789" is 0xe3069283 (RFC 3720 appendix B.4 polynomial).
	c := crc32.Checksum([]byte("123456789"), crc32.MakeTable(crc32.Castagnoli))
	if c != 0xe3069283 {
		t.Fatalf("crc %x", c)
	}
	if m := maskedCRC([]byte("123456789")); m != (c>>15|c<<17)+0xa282ead8 {
		t.Errorf("masked crc %x", m)
	}
}

package trainer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"time"
)

// TensorBoard event files are TFRecords (length, masked CRC-32C of the length,
// data, masked CRC-32C of the data) of Event protobufs. Only a few fields are
// used, so the encoder is written out here: Event{wall_time 1, step 2,
// file_version 3, summary 5, session_log 7}, Summary{value 1}, Value{tag 1,
// simple_value 2}, SessionLog{status 1}.

// TBSink creates dir/events.out.tfevents.UNIX.NAME and writes one event per step.
// now stamps the events. Before the first one it marks a session start at that
// step, so that TensorBoard drops what earlier files of a resumed run hold from
// that step on.
func TBSink(dir, name string, now func() time.Time) (Sink, error) {
	path := filepath.Join(dir, fmt.Sprintf("events.out.tfevents.%010d.%s", now().Unix(), name))
	f, err := openAppended(path, os.O_EXCL)
	for n := 2; errors.Is(err, os.ErrExist); n++ { // two attempts within a second
		f, err = openAppended(fmt.Sprintf("%s.%d", path, n), os.O_EXCL)
	}
	if err != nil {
		return nil, diskError("create event file", path, 0, err)
	}
	s := &tbSink{f: f, now: now}
	if err := s.put(event(seconds(now()), 0, "brain.Event:2", nil)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

type tbSink struct {
	f       *appended
	now     func() time.Time
	started bool
}

func (s *tbSink) Write(r *Record) error {
	if !s.started {
		start := appendBytes(event(seconds(s.now()), int64(r.Step), "", nil), 7, []byte{1 << 3, 1}) // status START
		if err := s.put(start); err != nil {
			return err
		}
		s.started = true
	}
	return s.put(event(seconds(s.now()), int64(r.Step), "", r.Values()))
}

func (s *tbSink) Close() error { return errors.Join(s.f.Sync(), s.f.Close()) }

func (s *tbSink) put(data []byte) error {
	b := tfRecord(data)
	return diskError("write event file", s.f.Name(), int64(len(b)), s.f.append(b))
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }

// tfRecord frames data.
func tfRecord(data []byte) []byte {
	out := binary.LittleEndian.AppendUint64(nil, uint64(len(data)))
	out = binary.LittleEndian.AppendUint32(out, maskedCRC(out))
	out = append(out, data...)
	return binary.LittleEndian.AppendUint32(out, maskedCRC(data))
}

// maskedCRC rotates and offsets the CRC-32C, as TFRecord files want it.
func maskedCRC(b []byte) uint32 {
	c := crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
	return (c>>15 | c<<17) + 0xa282ead8
}

// event encodes an Event; version and values may be empty.
func event(wall float64, step int64, version string, values []Value) []byte {
	b := binary.LittleEndian.AppendUint64([]byte{1<<3 | 1}, math.Float64bits(wall))
	if step != 0 {
		b = binary.AppendUvarint(append(b, 2<<3), uint64(step))
	}
	if version != "" {
		b = appendBytes(b, 3, []byte(version))
	}
	if len(values) == 0 {
		return b
	}
	var sum []byte
	for _, v := range values {
		val := appendBytes(nil, 1, []byte(v.Name))
		val = binary.LittleEndian.AppendUint32(append(val, 2<<3|5), math.Float32bits(float32(v.V)))
		sum = appendBytes(sum, 1, val)
	}
	return appendBytes(b, 5, sum)
}

// appendBytes appends a length-delimited field.
func appendBytes(b []byte, field byte, v []byte) []byte {
	return append(binary.AppendUvarint(append(b, field<<3|2), uint64(len(v))), v...)
}

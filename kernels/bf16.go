package kernels

import "math"

// ToBF16 rounds x to the nearest bfloat16, ties to even; NaN stays a (quiet) NaN with its sign.
func ToBF16(x float32) uint16 {
	b := math.Float32bits(x)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16) | 0x40
	}
	return uint16((b + 0x7fff + b>>16&1) >> 16)
}

// FromBF16 is the float32 with the value of a bfloat16.
func FromBF16(b uint16) float32 { return math.Float32frombits(uint32(b) << 16) }

// ToBF16s converts src into dst (little endian, 2 bytes each); dst holds at least 2*len(src) bytes.
func ToBF16s(dst []byte, src []float32) {
	_ = dst[:2*len(src)]
	for i, x := range src {
		b := ToBF16(x)
		dst[2*i], dst[2*i+1] = byte(b), byte(b>>8)
	}
}

// FromBF16s converts little-endian bfloat16 bytes into dst; src holds at least 2*len(dst) bytes.
func FromBF16s(dst []float32, src []byte) {
	_ = src[:2*len(dst)]
	for i := range dst {
		dst[i] = FromBF16(uint16(src[2*i]) | uint16(src[2*i+1])<<8)
	}
}

// SplitF32 splits a float32 for AdamWArgs.Lo: hi is the nearest bfloat16, ties away from zero, and lo what is missing, so that JoinF32
// gives x again, bit for bit. hi of a magnitude of at least 0x1.ffp127 is infinite; every NaN becomes the quiet NaN of its sign.
func SplitF32(x float32) (hi uint16, lo int16) {
	b := math.Float32bits(x)
	if b&0x7fffffff > 0x7f800000 {
		return uint16(b>>16)&0x8000 | 0x7fc0, 0
	}
	up := (b + 0x8000) >> 16
	return uint16(up), int16(b - up<<16)
}

// JoinF32 is the float32 that SplitF32 split.
func JoinF32(hi uint16, lo int16) float32 {
	return math.Float32frombits(uint32(hi)<<16 + uint32(int32(lo)))
}

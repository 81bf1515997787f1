package dbbench

import "testing"

// Expected values are what CPython 3.11's repr() prints.
func TestRepr(t *testing.T) {
	for _, c := range []struct {
		raw    any
		dbType string
		want   string
	}{
		{nil, "TEXT", "None"}, {int64(-3), "BIGINT", "-3"}, {uint64(18446744073709551615), "UNSIGNED BIGINT", "18446744073709551615"},
		{[]byte("7"), "INT", "7"}, {[]byte("1.50"), "DECIMAL", "Decimal('1.50')"}, {float64(3), "DOUBLE", "3.0"}, {1e16, "DOUBLE", "1e+16"},
		{float32(1.1), "FLOAT", "1.1"}, {[]byte("2020"), "YEAR", "2020"}, {[]byte("abc"), "VARCHAR", "'abc'"}, {[]byte("it's"), "TEXT", `"it's"`},
		{[]byte(`a'b"c`), "TEXT", `'a\'b"c'`}, {[]byte("a\\b\n\t\r\x01\x7f"), "TEXT", `'a\\b\n\t\r\x01\x7f'`},
		{[]byte("é–中😀"), "TEXT", "'é–中😀'"}, {[]byte("\u00a0\u200b\u3000\U000e0001"), "TEXT", `'\xa0\u200b\u3000\U000e0001'`},
		{[]byte("\xff"), "TEXT", `'\xff'`}, {[]byte("2020-01-02"), "DATE", "datetime.date(2020, 1, 2)"}, {[]byte("0000-00-00"), "DATE", "None"},
		{[]byte("2020-01-02 03:04:05"), "DATETIME", "datetime.datetime(2020, 1, 2, 3, 4, 5)"}, {[]byte("2020-01-02 03:04:00"), "DATETIME", "datetime.datetime(2020, 1, 2, 3, 4)"},
		{[]byte("2020-01-02 03:04:00.5"), "TIMESTAMP", "datetime.datetime(2020, 1, 2, 3, 4, 0, 500000)"},
		{[]byte("2020-01-02 00:00:00"), "DATETIME", "datetime.datetime(2020, 1, 2, 0, 0)"},
		{[]byte("01:02:03"), "TIME", "datetime.timedelta(seconds=3723)"}, {[]byte("00:00:00"), "TIME", "datetime.timedelta(0)"},
		{[]byte("-01:00:00"), "TIME", "datetime.timedelta(days=-1, seconds=82800)"}, {[]byte("50:00:00.25"), "TIME", "datetime.timedelta(days=2, seconds=7200, microseconds=250000)"},
		{[]byte("a'\x00\xff\n"), "BLOB", `b"a'\x00\xff\n"`}, {[]byte("\x05"), "BIT", "5"}, {[]byte("{}"), "JSON", "'{}'"}, {[]byte("odd"), "DATE", "'odd'"}, {[]byte("odd"), "TIME", "'odd'"},
	} {
		if got := string(appendRepr(nil, cell(c.raw, c.dbType))); got != c.want {
			t.Errorf("%v %s: %s, want %s", c.raw, c.dbType, got, c.want)
		}
	}
	if got := string(appendRow(appendRow(nil, []value{"a"}), []value{"a", nil})); got != "('a',)('a', None)" {
		t.Errorf("rows: %s", got)
	}
}

// The cap counts code points, not bytes.
func TestClip(t *testing.T) {
	for _, c := range []struct {
		in   string
		max  int
		want string
		cut  bool
	}{{"abc", 3, "abc", false}, {"abcd", 3, "abc[TRUNCATED]", true}, {"ééé", 3, "ééé", false}, {"éééé", 3, "ééé[TRUNCATED]", true}, {"", 3, "", false}} {
		if got, cut := clip(c.in, c.max); got != c.want || cut != c.cut {
			t.Errorf("clip(%q, %d) = %q, %v", c.in, c.max, got, cut)
		}
	}
}

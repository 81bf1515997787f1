package dbbench

import (
	"bufio"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// shared finds the benchmark rows next to the repository, or skips.
func shared(t *testing.T, name string) string {
	t.Helper()
	p := filepath.Join("..", "..", "..", "shared", "data", "dbbench", name)
	if _, err := os.Stat(p); err != nil {
		t.Skipf("no DBBench rows: put %s of an AgentBench clone (data/dbbench) into ../shared/data/dbbench next to the repository", name)
	}
	return p
}

// mariaDSN gives a real server: HS_MARIADB_DSN, else a mariadbd started in a
// temporary directory, else a skip.
func mariaDSN(t *testing.T) (dsn string, stop func()) {
	t.Helper()
	if d := os.Getenv("HS_MARIADB_DSN"); d != "" {
		return d, nil
	}
	daemon, err := exec.LookPath("mariadbd")
	if err != nil {
		daemon = "/usr/sbin/mariadbd"
	}
	install, err2 := exec.LookPath("mariadb-install-db")
	if _, err := os.Stat(daemon); err != nil || err2 != nil {
		t.Skip("no MariaDB: apt-get install --no-install-recommends mariadb-server, or set HS_MARIADB_DSN=root@tcp(127.0.0.1:3306)/")
	}
	dir, err := os.MkdirTemp("", "hsdb")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	data := filepath.Join(dir, "d")
	if out, err := exec.Command(install, "--no-defaults", "--user=root", "--datadir="+data, "--auth-root-authentication-method=normal",
		"--skip-test-db", "--innodb-log-file-size=4M").CombinedOutput(); err != nil {
		t.Fatalf("install database: %v\n%s", err, out)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	l.Close()
	cmd := exec.Command(daemon, "--no-defaults", "--user=root", "--datadir="+data, "--socket="+dir+"/s", "--pid-file="+dir+"/p",
		"--bind-address=127.0.0.1", "--port="+strconv.Itoa(port), "--character-set-server=utf8mb4")
	logs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	drained := make(chan struct{})
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cmd.Process.Kill()
			<-drained
			cmd.Wait()
		})
	}
	ready := make(chan bool, 1)
	go func() {
		defer close(drained)
		sc := bufio.NewScanner(logs)
		for sc.Scan() {
			if strings.Contains(sc.Text(), "ready for connections") {
				ready <- true
			}
		}
		close(ready)
	}()
	t.Cleanup(stop)
	if !<-ready {
		t.Fatal("mariadbd ended before it was ready")
	}
	return "root@tcp(127.0.0.1:" + strconv.Itoa(port) + ")/", stop
}

func replayFile(t *testing.T, name string, o Options, known map[string]string) {
	t.Helper()
	rows, err := ReadRows(shared(t, name))
	if err != nil {
		t.Fatal(err)
	}
	rep, err := GoldReplay(t.Context(), rows, o, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %d of %d pass", name, rep.Passed, rep.Rows)
	if rep.Passed*100 < rep.Rows*97 || rep.Passed+len(rep.Failed) != rep.Rows {
		t.Errorf("%d of %d rows pass, want >= 97 %%", rep.Passed, rep.Rows)
	}
	for _, f := range rep.Failed {
		t.Logf("%s: %s", f.ID, f.Reason)
		if want, ok := known[f.ID]; !ok || !strings.Contains(f.Reason, want) {
			t.Errorf("%s fails unexpectedly: %s", f.ID, f.Reason)
		}
		delete(known, f.ID)
	}
	for id := range known {
		t.Errorf("%s is listed as failing and passes", id)
	}
}

func TestGoldReplayEmbedded(t *testing.T) {
	replayFile(t, "dev.jsonl", Options{}, map[string]string{"dev-5": "name is empty"})
	replayFile(t, "standard-odd.jsonl", Options{}, map[string]string{})
}

func TestGoldReplayMariaDB(t *testing.T) {
	dsn, _ := mariaDSN(t)
	replayFile(t, "dev.jsonl", Options{DSN: dsn}, map[string]string{"dev-5": "name is empty"})
	// Strict mode compares a text column with a number there; on the embedded engine the statement runs.
	replayFile(t, "standard-odd.jsonl", Options{DSN: dsn}, map[string]string{"standard-odd-139": "1292 (22007)"})
}

# shellcheck shell=bash
# The common part of the sbatch files, which source it. It sets, from the environment or by default:
#
#   TREE_ATTN_HOME     the checkout                               the folder that sbatch was called in
#   TREE_ATTN_SETUP    a file to source on each node, for         none
#                      `module load` or `source .venv/bin/activate`
#   TREE_ATTN_COMMAND  what runs in every task, e.g.              tree-attn
#                      `apptainer exec --nv image.sif tree-attn`
#   TREE_ATTN_SRUN     more flags for srun                        none
#   TREE_ATTN_OUT      results                                    results/JOB in the folder that sbatch was called in
#   TREE_ATTN_END_S    how long srun may take to end the rest     60
#                      when a rank has failed
#   TREE_ATTN_REQUEUE  whether a job that lost a rank after it    yes
#                      has finished something queues itself again
#   TREE_ATTN_LOGS     the folder of the logs, JOB-RANK.log       logs/ in the folder of the results
#
# A job that is requeued has the same job id, hence the same folder, and goes on from the files in it.

TREE_ATTN_HOME=${TREE_ATTN_HOME:-$SLURM_SUBMIT_DIR}
export TREE_ATTN_OUT=${TREE_ATTN_OUT:-$SLURM_SUBMIT_DIR/results/$SLURM_JOB_ID}
TREE_ATTN_LOGS=${TREE_ATTN_LOGS:-$TREE_ATTN_OUT/logs}
read -ra command_words <<<"${TREE_ATTN_COMMAND:-tree-attn}"
read -ra srun_flags <<<"${TREE_ATTN_SRUN:-}"
if [ -n "${TREE_ATTN_SETUP:-}" ]; then
  set +u # the activate scripts of conda and of module systems read variables that are not set
  # shellcheck disable=SC1090
  source "$TREE_ATTN_SETUP"
  set -u
fi
# shellcheck source=slurm/env.sh
source "$TREE_ATTN_HOME/slurm/env.sh"

say() { echo "$(date +%FT%T) $(hostname): $*"; }

# SLURM sends USR1 when the time limit is near (--signal in the sbatch files), TERM when the job is cancelled, preempted
# or out of time. Finished work is on disk at every moment, so there is nothing to save here.
scratch=$(mktemp -d)
helper= # ends the step where srun cannot
trap 'rm -rf "$scratch"; [ -z "$helper" ] || kill "$helper" 2>/dev/null || true' EXIT
touch "$scratch/started"
saved_files='*.jsonl' # what shows progress where it changes; logs never do
has_progressed() {
  find "$TREE_ATTN_OUT" -path "$TREE_ATTN_LOGS" -prune -o \
    -type f -name "$saved_files" -newer "$scratch/started" -print 2>/dev/null | grep -q .
}
on_time_limit() {
  if ! has_progressed; then
    say "job $SLURM_JOB_ID is near its time limit and has finished nothing in it: it is not requeued; give it more time"
    return 0 # a bare `return` in a trap returns the signal's status, and `set -e` would end the job by it
  fi
  say "job $SLURM_JOB_ID is near its time limit: it is requeued, and goes on from what is in $TREE_ATTN_OUT"
  scontrol requeue "$SLURM_JOB_ID" || say "it could not be requeued; submit it again with TREE_ATTN_OUT=$TREE_ATTN_OUT"
}
must_end=
on_term() {
  must_end=yes
  say "job $SLURM_JOB_ID got a signal to end; finished work is in $TREE_ATTN_OUT, and the same job goes on from there"
}
trap on_time_limit USR1
trap on_term TERM

# Runs `tree-attn` (or what `command_words` holds) with these arguments in every task, one log per rank, and returns the worst exit status. A rank that
# fails ends the others: the rest would wait for it in the next collective, for ever.
run_ranks() {
  local step status=0
  mkdir -p "$TREE_ATTN_OUT" "$TREE_ATTN_LOGS"
  : >"$scratch/srun"
  srun --kill-on-bad-exit=1 --open-mode=append --output="$TREE_ATTN_LOGS/%j-%t.log" "${srun_flags[@]}" \
    "${command_words[@]}" "$@" 2> >(tee "$scratch/srun" >&2) &
  step=$!
  end_if_stuck "$step" &
  helper=$!
  # A signal to this script ends `wait` early.
  while wait "$step" && status=0 || status=$?; kill -0 "$step" 2>/dev/null; do :; done
  kill "$helper" 2>/dev/null || true
  helper=
  # Ranks that got the signal may end with status 0, without having done all their work.
  [ -z "$must_end" ] || status=143
  if [ "$status" != 0 ]; then
    say_last_words "$status"
    requeue_if_lost "$status"
  fi
  return "$status"
}

# srun waits for tasks that it cannot reach until SLURM gives their node up, 5 minutes by default. It ends with srun, and
# with the script: a script that was killed leaves nothing behind, and its numbers may soon be another process's.
end_if_stuck() {
  local i
  trap - USR1 TERM EXIT
  until grep -q 'error: .*: tasks\? ' "$scratch/srun" 2>/dev/null; do
    sleep 1
    both_run "$1" || return 0
  done
  for ((i = 0; i < ${TREE_ATTN_END_S:-60}; i++)); do
    sleep 1
    both_run "$1" || return 0
  done
  say "a rank has failed, and srun cannot end the others in ${TREE_ATTN_END_S:-60} s: some node cannot be reached"
  kill -KILL "$1"
}

both_run() { kill -0 "$1" 2>/dev/null && kill -0 "$$" 2>/dev/null; }

# A rank or a link that was lost is no fault of the command: the job goes on elsewhere, or when the link is back. Status
# 75 says so; above 128, a signal ended a rank. A rank that failed by itself would fail again, whatever ended the others.
requeue_if_lost() {
  if [ -n "$must_end" ] || [ "${TREE_ATTN_REQUEUE:-yes}" != yes ] || { [ "$1" != 75 ] && [ "$1" -le 128 ]; }; then
    return 0
  elif grep -qE 'Exited with exit code [12]$' "$scratch/srun"; then
    say "a rank failed by itself: the job is not requeued"
    return 0
  elif ! has_progressed; then
    say "the job lost a rank before it had finished anything: it is not requeued"
    return 0
  fi
  say "the job lost a rank: it is requeued, and goes on from what is in $TREE_ATTN_OUT"
  scontrol requeue "$SLURM_JOB_ID" || say "it could not be requeued; submit it again with TREE_ATTN_OUT=$TREE_ATTN_OUT"
}

say_last_words() {
  local log
  say "the ranks ended with status $1. The last lines of every rank's log:"
  for log in "$TREE_ATTN_LOGS/$SLURM_JOB_ID"-*.log; do
    tail -n 3 "$log" | cut -c1-1000 | sed "s|^|${log##*/}: |"
  done
  if [ -z "$must_end" ] && grep -qiE ': (Killed|Out Of Memory)|oom.kill' "$scratch/srun"; then
    say "a rank was killed from outside, as the kernel does where a node has no memory left (see dmesg there): ask for" \
      "more with --mem, or put fewer ranks on a node"
  fi
}

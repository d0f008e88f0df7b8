#!/usr/bin/env bash
# Runs one worker per task of a Slurm job. Submit it from the root of the repository, in a folder that
# all nodes share, with the virtual environment active:
#
#   sbatch deploy/slurm.sh --gin_file=configs/digits_cnn.gin --model_dir=runs/digits
#   sbatch --nodes=4 --gpus-per-node=1 deploy/slurm.sh --gin_file=...
#
#   LOOPWRIGHT_WORKERS=2:4 sbatch --nodes=2-4 deploy/slurm.sh --gin_file=...
#
# Before the time limit Slurm sends SIGTERM to the workers. They save and exit with status 75, and the
# job is queued again and continues. After a failure the workers restart in the same allocation,
# up to MAX_RESTARTS times (default 3). A mistake (status 2) ends the job.
#
# With a range of nodes each start takes as many as there are. LOOPWRIGHT_WORKERS=LEAST:MOST also
# refuses what depends on their number, and once in LOOK_S (default 60) seconds looks whether a node
# of the job is drained, or one that it lost is idle: then all save, and the job is queued again.

#SBATCH --job-name=loopwright
#SBATCH --nodes=2
#SBATCH --cpus-per-task=4
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append

set -u

mkdir -p runs
job=${SLURM_CLUSTER_NAME-}-$SLURM_JOB_ID
trap 'kill $(jobs -p) 2>/dev/null' EXIT

# Jobs on one node need different ports: 16 per job, below the ephemeral range.
port_base=$((10000 + SLURM_JOB_ID % 1000 * 16))

tasks_per_node=${SLURM_NTASKS_PER_NODE:-1}

# Do not kill the others when one worker ends: they save, or detect the loss, by themselves.
train() {
  srun --ntasks-per-node="$tasks_per_node" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    --kill-on-bad-exit=0 --wait=0 --label python launch.py "$@" \
    --gin_param="run.strategy = @multi_worker_mirrored" \
    --gin_param="multi_worker_mirrored.resolver = @slurm" \
    --gin_param="slurm.port_base = $port_base"
}

# When srun itself is killed, its tasks go on and own model_dir. The next srun waits for their end.
end_steps() {
  squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep '\.[0-9]*$' |
    xargs --no-run-if-empty scancel --signal=KILL
}

# ---- If the number of workers may vary ----

states() { sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --nodes="$1" --format=%T; }

# Whether this job wants other nodes: some are drained and enough are left, or a lost one is idle.
wants_others() {
  local least=${LOOPWRIGHT_WORKERS%:*} most=${LOOPWRIGHT_WORKERS#*:} now=$SLURM_JOB_NUM_NODES left
  left=$(states "$SLURM_JOB_NODELIST" | grep -vc '^drain')
  ((left < now && left * tasks_per_node >= least)) && return
  ((now * tasks_per_node < most)) && states "$had" | grep -qx idle
}

nodes=runs/.nodes-$job # all that this job has had: Slurm forgets them when it queues a job again
if [[ -n ${LOOPWRIGHT_WORKERS-} ]]; then
  if [[ ! $LOOPWRIGHT_WORKERS =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]]; then
    echo "LOOPWRIGHT_WORKERS is $LOOPWRIGHT_WORKERS; it must be LEAST:MOST, such as 2:4" >&2
    exit 2
  fi
  echo "$SLURM_JOB_NODELIST" >>"$nodes"
  had=$(paste -sd, "$nodes")
  while sleep "${LOOK_S:-60}"; do
    if wants_others; then
      echo "this job wants other nodes: all save at the end of this loop" >&2
      scancel --signal=TERM "$SLURM_JOB_ID" # its steps, not this script
    fi
  done &
fi

end() {
  rm -f "$nodes"
  exit "$1"
}

for ((restarts = 0; ; restarts++)); do
  train "$@"
  status=$? # the highest status of all tasks
  case $status in
    0 | 2) end "$status" ;;
    75)
      scontrol requeue "$SLURM_JOB_ID" # which also ends this script
      exit 75
      ;;
  esac
  if ((restarts >= ${MAX_RESTARTS:-3})); then
    end "$status"
  fi
  echo "status $status; restarting all workers, attempt $((restarts + 1))" >&2
  end_steps
done

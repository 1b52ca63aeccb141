;;; Schedules: the learning rate of an update as tensor code on (step), the updates done so far. They never recompile.
;;; Each gives a scalar f32. Their settings are compile-time numbers; beyond its last step a schedule keeps its last value.

(defparameter half-turn 3.141592653589793 "The number pi: half a turn in radians.")

(defun updates-done ()
  "The number of updates done so far as f32: 0 at the first step. A scalar."
  (cast (step) f32))

(defun done-fraction (start end)
  "How far (step) is from start to end: 0 up to start, 1 from end on. A scalar."
  (clamp (/ (- (updates-done) start) (max 1 (- end start))) :low 0 :high 1))

(defun cosine-between (high low fraction)
  "From high (fraction 0) to low (fraction 1) along half a cosine. A scalar."
  (+ low (* (* 1/2 (- high low)) (+ 1 (cos (* half-turn fraction))))))

(defun warmup-then (warmup peak later)
  "peak (step + 1) / warmup during the first warmup steps (peak / warmup at step 0), then the scalar `later`."
  (if (> warmup 0)
      (where (< (updates-done) warmup) (* (/ peak warmup) (+ 1 (updates-done))) later)
      later))

(defun constant-rate (rate)
  "The same rate at every step, as a scalar."
  (+ rate (* 0 (updates-done))))

(defun linear-decay (&key peak steps (final 0))
  "From peak at step 0 in a straight line to final at `steps`. A scalar."
  (+ peak (* (- final peak) (done-fraction 0 steps))))

(defun cosine-decay (&key peak steps (final 0))
  "From peak at step 0 along half a cosine to final at `steps` (Loshchilov and Hutter 2017, without restarts). A scalar."
  (cosine-between peak final (done-fraction 0 steps)))

(defun step-decay (&key peak every (factor 1/10))
  "peak times factor for every whole `every` steps done. A scalar."
  (* peak (power factor (floor (/ (updates-done) every)))))

(defun exponential-decay (&key peak (every 1) factor)
  "peak factor^(step / every): a smooth `step-decay`. A scalar."
  (* peak (power factor (/ (updates-done) every))))

(defun warmup-cosine (&key peak warmup steps (final 0))
  "A straight warmup to peak, reached by the last of `warmup` steps, then half a cosine to final at `steps`.
At step 0 the rate is peak / warmup. With warmup >= steps there is only the warmup, and peak after it. A scalar."
  (warmup-then warmup peak
    (if (>= warmup steps) (constant-rate peak) (cosine-between peak final (done-fraction warmup steps)))))

(defun warmup-linear (&key peak warmup steps (final 0))
  "As `warmup-cosine`, and after the warmup a straight line to final at `steps` (BERT, Devlin et al. 2019). A scalar."
  (warmup-then warmup peak
    (if (>= warmup steps) (constant-rate peak) (+ peak (* (- final peak) (done-fraction warmup steps))))))

(defun warmup-hold-decay (&key peak warmup steps (decay (* 1/5 steps)) (final 0))
  "A straight warmup, peak until `decay` steps are left, then a straight line to final at `steps`
(\"warmup-stable-decay\", Hu et al. 2024). A scalar."
  (warmup-then warmup peak
    (if (>= warmup steps)
        (constant-rate peak)
        (+ peak (* (- final peak) (done-fraction (max warmup (- steps decay)) steps))))))

(defun inverse-square-root (&key peak warmup)
  "A straight warmup, then peak √(warmup / (step + 1)) (Vaswani et al. 2017); warmup is at least 1. A scalar."
  (warmup-then warmup peak (* peak (sqrt (/ warmup (+ 1 (updates-done)))))))

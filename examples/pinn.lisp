;;; A physics-informed network: it learns a damped oscillator from the equation alone,
;;;     u'' + 2 damping frequency u' + frequency² u = 0,  u(0) = 1,  u'(0) = 0.
;;; Shows `grad` in a loss, twice, and training through it: the step needs third derivatives.
;;; `data/pinn_points.csv` has the times at which the equation must hold; make_pinn_points.py made it.
;;;
;;;     sexpgpu run examples/pinn.lisp
(import "nn" "optim" "loss" "schedule")

(defknob hidden 48 "units of each of the two hidden layers" :min 1)
(defknob frequency 6 "of the oscillator without damping, radians a unit of time")
(defknob damping 0.2 "damping ratio" :min 0 :max 0.99)
(defknob lr 3e-3 "peak learning rate")
(defknob batch 64 "points in a step")
(defknob steps 2000 "steps of the run")
(defknob seed 1 "seed of the run")

(defdata points
  (csv "data/pinn_points.csv" :fields ((time f32)))
  :split ((train 4/5) (valid 1/5)))

;; 1 + t² n(t) has the initial values whatever the network n is.
(deflayer motion (time)
  (let* ((x (expand-dims time :axis -1))
         (x (tanh (linear x hidden :name "in")))
         (x (tanh (linear x hidden :name "middle"))))
    (+ 1 (* (square time) (squeeze (linear x 1 :name "out") :axis -1)))))

;; Each u depends on its own time only, so the gradient of their sum has each one's derivative.
(defun derivative (values time)
  (grad (sum values) time))

(defun residual-of (time)
  (let* ((u (motion time))
         (velocity (derivative u time))
         (acceleration (derivative velocity time)))
    (+ acceleration
       (+ (* (* 2 damping frequency) velocity)
          (* (* frequency frequency) u)))))

(defun equation-loss (time)
  (mean (square (/ (residual-of time) (* frequency frequency)))))

(defun exact (time)
  (let* ((decay (* damping frequency))
         (turn (* frequency (sqrt (- 1 (* damping damping)))))
         (angle (* turn time)))
    (* (exp (* (- decay) time))
       (+ (cos angle) (* (/ decay turn) (sin angle))))))

;; Root of the mean squared distance to the solution, which training never sees.
(defun distance (time)
  (sqrt (mean-squared-error (motion time) (exact time))))

(defrun solve
  :data (batches points :split train :batch batch :shuffle true)
  :loss equation-loss
  :optimizer (adam :lr (warmup-cosine :peak lr :warmup 50 :steps steps))
  :steps steps
  :seed seed
  :checkpoint-every 500)

(defeval valid
  :data (batches points :split valid :batch 128)
  :every 250
  :metrics ((loss equation-loss) (distance distance)))
